"""Statistics of delayed FP8 scaling: every projection's largest |x|, |W| and |dy| over the last steps.

    history_3H    by role; the first entry is the current step's maximum, the others those of the steps before it,
                  the newest last (Transformer Engine's order)
    scale_3       range / max(history), as of the last accepted step

Within a step scales are fixed and maxima only rise. A forward pass that runs again (recomputation, the chunks of TBTT,
micro-batches) therefore changes nothing that the first pass has not changed. When the step is accepted, maxima are
reduced over all tensor- and data-parallel ranks, which therefore hold the same values: a weight's maximum is that of
the full weight, in every layout. Then the new scales are computed, and the histories shift by one step. Refused steps
and evaluations leave no trace. A maximum that is zero or not finite leaves the scale unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hybridtron.parallel import transformer_engine
from hybridtron.parallel.blocks import block
from hybridtron.parallel.fp8 import FORMATS, Fp8, Fp8Linear, Part, ScalingStatistics, Slots
from hybridtron.problems import ConfigError, Problem

ROLES = len(FORMATS)


class Delayed(ScalingStatistics):
    """Statistics of emulated projections, by weight name; kept in two tensors, so that one collective suffices."""

    def __init__(self, projections: Mapping[str, Fp8Linear], fp8: Fp8, device: torch.device) -> None:
        self.names = list(projections)
        self.group = fp8.group
        self.history_PRH = torch.zeros(len(self.names), ROLES, fp8.history, device=device)
        self.scale_PR = torch.ones(len(self.names), ROLES, device=device)
        self.largest_R = torch.tensor([torch.finfo(dtype).max for dtype in FORMATS.values()], device=device)
        for projection, history_RH, scale_R in zip(projections.values(), self.history_PRH, self.scale_PR, strict=True):
            projection.slots = Slots(history_RH[:, 0], scale_R)

    def settle(self, accepted: bool) -> None:
        if accepted:
            greatest_PR = self.history_PRH[..., 0].contiguous()
            if self.group is not None and self.names:
                dist.all_reduce(greatest_PR, dist.ReduceOp.MAX, group=self.group)
            self.history_PRH[..., 0] = greatest_PR
            greatest_PR = self.history_PRH.amax(-1)
            scale_PR = (self.largest_R / greatest_PR).clamp(max=torch.finfo(torch.float32).max)
            usable_PR = torch.isfinite(greatest_PR) & (greatest_PR > 0)
            self.scale_PR.copy_(torch.where(usable_PR, scale_PR, self.scale_PR))
            self.history_PRH.copy_(self.history_PRH.roll(-1, -1))
        self.history_PRH[..., 0] = 0

    def parts(self) -> Iterator[Part]:
        for name, history_RH, scale_R in zip(self.names, self.history_PRH, self.scale_PR, strict=True):
            yield Part(f"fp8_history.{name}", tuple(history_RH.shape), (0, 0), history_RH)
            yield Part(f"fp8_scale.{name}", tuple(scale_R.shape), (0,), scale_R)


def statistics_of(modules: Iterable[tuple[str, Any]], fp8: Fp8 | None, device: torch.device) -> ScalingStatistics:
    """Build the statistics for all FP8 projections among named modules."""
    if fp8 is None or not fp8.delayed:
        return ScalingStatistics()
    if not fp8.emulate:
        return transformer_engine.TransformerEngineStatistics(modules, fp8)
    projections = {f"{name}.weight": module for name, module in modules if isinstance(module, Fp8Linear)}
    return Delayed(projections, fp8, device)


def statistics_blocks(statistics: ScalingStatistics, writes: Callable[[str], bool]) -> list[Any]:
    """Return the statistics as checkpoint blocks. They are replicated on tensor- and data-parallel ranks; one rank
    writes each.
    """
    return [block(part.key, part.shape, part.offset, part.data, writes(part.key)) for part in statistics.parts()]


def known_blocks(blocks: Iterable[Any], shapes: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Return the blocks that a checkpoint holds; projections that were in bf16 before start with an empty history.

    Raises ConfigError if the checkpoint's history has another length than `precision.history`.
    """
    stored_blocks = [entry for entry in blocks if entry.key in shapes]
    for entry in stored_blocks:
        if entry.key.startswith("fp8_history.") and (stored_length := shapes[entry.key][1]) != entry.global_shape[1]:
            message = f"is {entry.global_shape[1]}, but the checkpoint remembers {stored_length} steps: set it so"
            raise ConfigError([Problem("precision.history", "changed", message)])
    return stored_blocks
