"""Which of our tensors another format's are made of: one table for both directions.

Every fused tensor of the formats that we know is some of ours, one below the other: a checkpoint stores projections by
their parts. So a rule names one of their tensors and our keys in order; from right to left it is cut at the same rows.
Shapes follow from the configuration, before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import parameter_table

CONVOLUTION = "conv1d.weight"
Names = Mapping[str, tuple[str, ...]]
"""Their name -> our keys, both inside a sub-layer."""

MAMBA: Names = {
    "in_proj.weight": ("in_proj.weight.x", "in_proj.weight.z"),
    "conv1d.weight": ("conv_weight",),
    "conv1d.bias": ("conv_bias",),
    "x_proj.weight": ("x_proj.weight.dt", "x_proj.weight.B", "x_proj.weight.C"),
    "dt_proj.weight": ("dt_proj.weight",),
    "dt_proj.bias": ("dt_bias",),
    "A_log": ("A_log",),
    "D": ("D",),
    "out_proj.weight": ("out_proj.weight",),
}
MAMBA2: Names = {
    "in_proj.weight": (
        *("in_proj.weight.z", "in_proj.weight.x"),
        *("bc_proj.weight.B", "bc_proj.weight.C", "in_proj.weight.dt"),
    ),
    "conv1d.weight": ("x_conv_weight", "bc_conv_weight.B", "bc_conv_weight.C"),
    "conv1d.bias": ("x_conv_bias", "bc_conv_bias.B", "bc_conv_bias.C"),
    "dt_bias": ("dt_bias",),
    "A_log": ("A_log",),
    "D": ("D",),
    "norm.weight": ("norm_weight",),
    "out_proj.weight": ("out_proj.weight",),
}
ATTENTION: Names = {
    "q_proj.weight": ("q.weight",),
    "k_proj.weight": ("kv.weight.k",),
    "v_proj.weight": ("kv.weight.v",),
    "o_proj.weight": ("out.weight",),
}
MLP: Names = {
    "gate_proj.weight": ("gate_up.weight.gate",),
    "up_proj.weight": ("gate_up.weight.up",),
    "down_proj.weight": ("down.weight",),
}


@dataclass(frozen=True)
class Rule:
    """One of their tensors: its name and shape, our keys one below the other, and whether it stays in fp32."""

    theirs: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    rows: tuple[int, ...]
    fp32: bool

    def to_theirs(self, read: Callable[[str], Tensor]) -> Tensor:
        """Their tensor, from ours by key."""
        parts = [read(key) for key in self.ours]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(self.shape)

    def to_ours(self, theirs: Tensor) -> dict[str, Tensor]:
        """Our tensors by key, from theirs, in fp32 where we keep them so."""
        rest = self.shape[2:] if self.theirs.endswith(CONVOLUTION) else self.shape[1:]
        parts = zip(self.ours, theirs.split(self.rows), strict=True)
        ours = {key: part.reshape(len(part), *rest) for key, part in parts}
        return {key: part.float() for key, part in ours.items()} if self.fp32 else ours


class Rules:
    """Rules for a model as they are found, and at the end the proof that they use each of its weights once."""

    def __init__(self, model: ModelConfig) -> None:
        table = parameter_table(model)
        self.shapes = {k: shape for name, weight in table.items() for k, shape in weight.stored(name).items()}
        self._fp32 = {name for name, weight in table.items() if weight.fp32}
        self._rules: list[Rule] = []

    def add(self, theirs: str, *ours: str) -> None:
        """One of their tensors. What we keep as (channels, taps) is a convolution's (channels, 1, taps) there."""
        rows = tuple(self.shapes[key][0] for key in ours)
        shape = (sum(rows), *self.shapes[ours[0]][1:])
        if theirs.endswith(CONVOLUTION):
            shape = (shape[0], 1, *shape[1:])
        self._rules.append(Rule(theirs, shape, ours, rows, ours[0] in self._fp32))

    def add_all(self, theirs: str, names: Names, index: int) -> None:
        """Those of a mixer, whose names there start with `theirs`."""
        for name, keys in names.items():
            self.add(f"{theirs}.{name}", *(f"layers.{index}.mixer.{key}" for key in keys))

    def complete(self) -> list[Rule]:
        used = [key for rule in self._rules for key in rule.ours]
        assert sorted(used) == sorted(self.shapes), f"{set(used) ^ set(self.shapes)} have no rule, or two"
        return self._rules
