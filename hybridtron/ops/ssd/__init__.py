"""The scan of Mamba-2 (SSD)."""
