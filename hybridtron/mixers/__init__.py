"""Torch modules of the mixers. The registry is in `architecture`: each spec names its module."""
