"""BABILong (Kuratov et al. 2024): stories of bAbI hidden in text, qa1 to qa10."""
