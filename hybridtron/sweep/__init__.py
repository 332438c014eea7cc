"""Sweeps: read many runs that differ in a few settings from a file, run several at a time, and compare them."""
