"""Determinism, where it is asked for: the same program gives the same bits again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Kernels of other packages that add up in no fixed order by default, cuBLAS and NCCL. What the user has set stays.
FIXED_ORDER = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "MAMBA_DETERMINISTIC": "1",
    "CAUSAL_CONV1D_DETERMINISTIC": "1",
}


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside the block, if wanted, the same program gives the same bits again; ops that can't are refused by torch."""
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
    """Check whether torch is inside a block of `deterministic(True)`."""
    return torch.are_deterministic_algorithms_enabled()
