"""The tasks of RULER (Hsieh et al. 2024), and a needle in a haystack at chosen depths and lengths."""
