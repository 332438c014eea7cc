"""BABILong (Kuratov et al. 2024): the stories of bAbI's tasks qa1 to qa10, hidden in long texts."""
