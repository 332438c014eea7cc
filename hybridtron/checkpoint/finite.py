"""Checks that weights and moments are finite. A checkpoint with NaN or infinity is neither written nor resumed from.

Training itself may never show such a value: with an infinite second moment every update of a weight is zero. An
asynchronous checkpoint checks its copies while the next step computes.

Carried states and FP8 statistics are not checked: both may hold values that are not finite, and the code that uses them
allows for this.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hybridtron.parallel.plain_values import all_gather_values

KINDS = ("model", "optimizer")  # kinds of a checkpoint's files that are checked
THREADS = 2  # torch reads memory with a single thread if it computes with a single thread


class NotFinite(ArithmeticError):
    """Raised when weights or moments are not finite; the checkpoint is not written."""


def not_finite(blocks: Iterable[Any]) -> str | None:
    """Return the key of the first block that holds NaN or an infinity, or None.

    Memory is read once, and a device is waited for once.
    """
    floating = [block for block in blocks if block.data.numel() and block.data.is_floating_point()]
    if not floating:
        return None
    with ThreadPoolExecutor(THREADS) as threads:
        extremes = torch.stack([*threads.map(lambda block: _extremes(block.data).float(), floating)]).cpu()
    fine = extremes.isfinite().all(dim=1).tolist()
    return next((block.key for block, finite in zip(floating, fine, strict=True) if not finite), None)


def all_finite(key: str | None) -> None:
    """Raise NotFinite on all processes if any process passes a key. All processes call this together."""
    if bad_key := next(filter(None, all_gather_values(key)), None):
        raise NotFinite(f"values of {bad_key} are not finite")


def is_finite(tensor: Tensor) -> bool:
    """Return True if all entries are finite. Integer tensors always are."""
    return not tensor.numel() or not tensor.is_floating_point() or bool(_extremes(tensor).isfinite().all())


def _extremes(tensor: Tensor) -> Tensor:
    """Return a tensor's minimum and maximum; both are NaN if any entry is."""
    return torch.stack(torch.aminmax(tensor.detach()))  # `isfinite` over all entries takes ten times as long
