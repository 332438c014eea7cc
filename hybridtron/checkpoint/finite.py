"""Whether weights and moments are numbers. No checkpoint with one that is not is written, and none is resumed from.

A step does not show it at once, and need not ever: with an infinite second moment every update of a weight is zero.
An asynchronous checkpoint looks at its copies, while the next step computes.

Carried states and the statistics of FP8 are not asked: both deal with values that are not finite, and may hold some.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hybridtron.parallel.plain_values import all_gather_values

KINDS = ("model", "optimizer")  # files of a checkpoint
THREADS = 2  # torch reads memory with one thread where it computes with one


class NotFinite(ArithmeticError):
    """What was trained is broken, and was not saved."""


def not_finite(blocks: Iterable[Any]) -> str | None:
    """The key of the first block that holds NaN or an infinity: memory is read once, one wait for a device."""
    asked = [one for one in blocks if one.data.numel() and one.data.is_floating_point()]
    if not asked:
        return None
    with ThreadPoolExecutor(THREADS) as threads:
        extremes = torch.stack([*threads.map(lambda one: _extremes(one.data).float(), asked)]).cpu()
    fine = extremes.isfinite().all(dim=1).tolist()
    return next((one.key for one, well in zip(asked, fine, strict=True) if not well), None)


def all_finite(key: str | None) -> None:
    """Raise NotFinite on all processes where any names a tensor that is not; all call this together."""
    if found := next(filter(None, all_gather_values(key)), None):
        raise NotFinite(f"values of {found} are not finite")


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries of one tensor are."""
    return not tensor.numel() or not tensor.is_floating_point() or bool(_extremes(tensor).isfinite().all())


def _extremes(tensor: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(tensor.detach()))  # NaN where there is one; `isfinite` takes ten times as long
