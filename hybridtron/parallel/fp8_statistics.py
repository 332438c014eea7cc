"""Statistics of delayed FP8 scaling: the largest |x|, |W| and |dy| of every linear layer over the last steps.

A linear layer (projection) has three tensors with the roles input x, weight W and output gradient dy. For the tensor t
in each role, the projection has

    history    the largest |t| in each of the last H steps. Entry 0 belongs to the current step, and the other
               entries to earlier steps, with the newest at the end (Transformer Engine's order).
    scale      the FP8 format's largest value, divided by the history's largest entry

Within a step, scales are fixed and maxima only increase. So a forward pass that is repeated for recomputation does not
change the statistics. If the engine accepts the step, the maxima are all-reduced over all tensor- and data-parallel
ranks. So the maxima are the same in every layout, as if one rank had the full weights and all rows (sequences). After
that the scales are computed, and the histories shift by one step. After a refused step and after an evaluation,
histories and scales keep their earlier values. A scale also keeps its value if the history's largest entry is zero or
not finite.

Legend: P projections, R roles, H steps in the history.
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
    """Statistics for emulated projections. All projections share two tensors, so that one all-reduce suffices."""

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
    """Build the statistics for all FP8 projections among `modules`, which are pairs (name, module)."""
    if fp8 is None or not fp8.delayed:
        return ScalingStatistics()
    if not fp8.emulate:
        return transformer_engine.TransformerEngineStatistics(modules, fp8)
    projections = {f"{name}.weight": module for name, module in modules if isinstance(module, Fp8Linear)}
    return Delayed(projections, fp8, device)


def statistics_blocks(statistics: ScalingStatistics, writes: Callable[[str], bool]) -> list[Any]:
    """Return the statistics as blocks for a checkpoint.

    Tensor- and data-parallel ranks hold the same statistics; `writes` returns True on the rank that writes a key.
    """
    return [block(part.key, part.shape, part.offset, part.data, writes(part.key)) for part in statistics.parts()]


def known_blocks(blocks: Iterable[Any], shapes: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Return the blocks whose keys are in a checkpoint. `shapes` maps the checkpoint's keys to shapes.

    A projection that was in bf16 has no keys in the checkpoint. Its history starts with zeros. Raises ConfigError if
    the checkpoint's history has another length than `precision.history`.
    """
    stored_blocks = [entry for entry in blocks if entry.key in shapes]
    for entry in stored_blocks:
        if entry.key.startswith("fp8_history.") and (stored_length := shapes[entry.key][1]) != entry.global_shape[1]:
            message = (
                f"is {entry.global_shape[1]}, but the checkpoint's history has {stored_length} steps: "
                f"set precision.history={stored_length}"
            )
            raise ConfigError([Problem("precision.history", "changed", message)])
    return stored_blocks
