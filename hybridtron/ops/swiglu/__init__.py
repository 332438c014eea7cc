"""The gate of a SwiGLU block."""
