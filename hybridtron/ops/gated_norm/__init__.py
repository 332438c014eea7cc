"""The gated norm of Mamba-2, in two steps."""
