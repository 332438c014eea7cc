"""Span-expanded attention (SE-Attn)."""
