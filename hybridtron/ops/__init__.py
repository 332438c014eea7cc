"""Ops: pure functions on tensors that own no parameters and know no parallelism. Each op has a folder."""
