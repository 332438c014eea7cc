"""Distributed pretraining of SSM/attention hybrids. The map of the package is in its README.md."""

__version__ = "0.1.0"
