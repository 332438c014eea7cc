"""Stands for flash-attn 2 where it is not installed."""
