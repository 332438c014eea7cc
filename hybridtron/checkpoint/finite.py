"""Checks for NaN and infinity in weights and Adam's moments.

A checkpoint with such a value is neither written nor resumed from. The loss need not show the fault: if a weight's
second moment is infinite, each update of this weight is zero.

Recurrent states and FP8 statistics are not checked, since both may contain NaN or infinity: the engine sets such a
state to zero, and FP8 scaling ignores such a statistic.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hybridtron.parallel.control import Control

KINDS = ("model", "optimizer")  # kinds of a checkpoint's files that are checked
THREADS = 2  # Python threads: if torch computes with one thread, a single Python thread leaves bandwidth unused


class NotFinite(ArithmeticError):
    """Raised when weights or moments contain NaN or infinity. The checkpoint is then not written."""


def not_finite(blocks: Iterable[Any]) -> str | None:
    """Return the key of the first block that contains NaN or infinity, or None.

    A block is a `ShardedTensor`: this process's shard of a tensor. The results of all blocks are copied to the CPU
    together, so that this process waits for the GPU only once.
    """
    floating = [block for block in blocks if block.data.numel() and block.data.is_floating_point()]
    if not floating:
        return None
    with ThreadPoolExecutor(THREADS) as threads:
        extremes = torch.stack([*threads.map(lambda block: _extremes(block.data).float(), floating)]).cpu()
    are_finite = extremes.isfinite().all(dim=1).tolist()
    return next((block.key for block, finite in zip(floating, are_finite, strict=True) if not finite), None)


def all_finite(key: str | None, control: Control) -> None:
    """Raise NotFinite on all processes if any process has a block with NaN or infinity.

    `key` is the result of `not_finite` on this process: such a block's key, or None. All processes call this together.
    """
    if bad_key := next(filter(None, control.all_gather(key)), None):
        raise NotFinite(f"{bad_key} contains NaN or infinity")


def is_finite(tensor: Tensor) -> bool:
    """Return True if the tensor contains no NaN and no infinity. Integer tensors never do."""
    return not tensor.numel() or not tensor.is_floating_point() or bool(_extremes(tensor).isfinite().all())


def _extremes(tensor: Tensor) -> Tensor:
    """Return a tensor's minimum and maximum; both are NaN if any element is NaN."""
    return torch.stack(torch.aminmax(tensor.detach()))  # ten times as fast as `isfinite` on each element
