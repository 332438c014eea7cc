"""Distributed pretraining of SSM/attention hybrids. README.md in this folder is the package's map."""

__version__ = "0.2.0"
