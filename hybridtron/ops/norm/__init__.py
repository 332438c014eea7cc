"""Root-mean-square norm, alone and after the sum of a residual stream."""
