"""Compiled CPU forms of the ops: C++ sources, and the code that builds them at first use."""
