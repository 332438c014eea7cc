"""The modules of mixers. The registry stands in `architecture`: each spec names its module."""
