"""Ops: pure functions on tensors; they own no parameters and know no parallelism. Each op has a folder."""
