"""Bit-reproducible computation, for runs with `run.deterministic`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Environment variables that make cuBLAS, NCCL and kernels of other packages sum in a fixed order. If the user has set
# such a variable, its value is kept, even if results are then not reproducible.
FIXED_ORDER = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "MAMBA_DETERMINISTIC": "1",
    "CAUSAL_CONV1D_DETERMINISTIC": "1",
}


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Make results bit-reproducible in the block, if `wanted` is True.

    Inside the block, torch raises an error for an operation without a deterministic implementation. The environment
    variables in FIXED_ORDER stay set after the block.
    """
    if not wanted:
        yield
        return
    for name, value in FIXED_ORDER.items():
        os.environ.setdefault(name, value)
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark


def is_deterministic() -> bool:
    """Return True inside a block of `deterministic(True)`."""
    return torch.are_deterministic_algorithms_enabled()
