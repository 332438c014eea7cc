"""Distributed pretraining of SSM/attention hybrids. README.md in this folder is a map of the package."""

__version__ = "0.2.0"
