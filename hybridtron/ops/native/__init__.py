"""Compiled CPU forms of the ops: C++ sources, and what builds them at first use."""
