"""Ops: pure functions on tensors. They own no parameters and know no parallelism. Each op has a folder."""
