"""Which of our tensors another format's are made of: one table for both directions.

Every fused tensor of the formats that we know is some of ours, one below the other: a checkpoint stores projections by
their parts. So a rule names one of their tensors and our keys in order; from right to left it is cut at the same rows.
Qwen's are fused head by head: first the rows of all of ours for the first head, then those for the next; and of a norm
it stores what is added to 1. Shapes follow from the configuration, before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridtron.architecture.base import Names
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture, parameter_table, weight_name

CONVOLUTION = "conv1d.weight"
ROUNDING = 2.0**-23  # of a number near 1 in fp32


@dataclass(frozen=True)
class TensorRule:
    """One of their tensors: its name and shape, our keys one below the other, and whether it stays in fp32.

    With `blocks` the parts stand one below the other in each of that number of blocks. `less_one` is of norms whose
    weight is 1 + theirs: in fp32, so that what is near 1 loses nothing. `also` is another name that some files have;
    `memory` is the name in transformers' module, where that is another: adapters have it.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    rows: tuple[int, ...]
    fp32: bool
    blocks: int = 1
    less_one: bool = False
    also: str = ""
    memory: str = ""

    @property
    def in_memory(self) -> str:
        return self.memory or self.theirs

    def to_theirs(self, read: Callable[[str], Tensor]) -> Tensor:
        """Their tensor, from ours by key."""
        parts = [read(key).unflatten(0, (self.blocks, -1)) for key in self.ours]
        made = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).reshape(self.shape)
        return made.float() - 1 if self.less_one else made

    def to_ours(self, theirs: Tensor) -> dict[str, Tensor]:
        """Our tensors by key, from theirs, in fp32 where we keep them so."""
        rest = self.shape[2:] if self.theirs.endswith(CONVOLUTION) else self.shape[1:]
        parts = theirs.unflatten(0, (self.blocks, -1)).split([rows // self.blocks for rows in self.rows], dim=1)
        ours = {key: part.reshape(-1, *rest) for key, part in zip(self.ours, parts, strict=True)}
        wide = {key: part.float() for key, part in ours.items()} if self.fp32 else ours
        return {key: part + 1 for key, part in wide.items()} if self.less_one else wide

    def same(self, made: Tensor, theirs: Tensor) -> bool:
        """Whether theirs has come back: bit for bit, or but for the rounding of 1 + theirs."""
        if self.less_one:
            return torch.allclose(made, theirs.float(), rtol=ROUNDING, atol=ROUNDING)
        return torch.equal(made.to(theirs.dtype), theirs)

    def as_named(self, names: Container[str]) -> TensorRule:
        """The rule by the one of its names that is there."""
        return replace(self, theirs=self.also) if self.also in names and self.theirs not in names else self


class Rules:
    """Rules for a model as they are found, and at the end the proof that they use each of its weights once."""

    def __init__(self, model: ModelConfig) -> None:
        table = parameter_table(model)
        self._arch = architecture(model)
        self.shapes = {k: shape for name, weight in table.items() for k, shape in weight.stored(name).items()}
        self._fp32 = {name for name, weight in table.items() if weight.fp32}
        self._rules: list[TensorRule] = []
        self._used: set[str] = set()

    def add(self, theirs: str, *ours: str) -> None:
        """One of their tensors. What we keep as (channels, taps) is a convolution's (channels, 1, taps) there."""
        self._used.update(ours)
        rows = tuple(self.shapes[key][0] for key in ours)
        shape = (sum(rows), *self.shapes[ours[0]][1:])
        if theirs.endswith(CONVOLUTION):
            shape = (shape[0], 1, *shape[1:])
        self._rules.append(TensorRule(theirs, shape, ours, rows, ours[0] in self._fp32))

    def add_mixer(self, theirs: str, index: int, names: Names | None = None) -> None:
        """Those of a sub-layer's mixer, whose names there start with `theirs`: the spec's, unless others are given.

        Others may name more than this mixer has.
        """
        if names is None:
            names = self._arch.specs[index].exported_names(self._arch.sizes)
        for name, keys in names.items():
            ours = [weight_name(self._arch, index, key) for key in keys]
            if ours[0] in self.shapes and ours[0] not in self._used:  # shared weights are those of the first place
                self.add(f"{theirs}.{name}", *ours)

    def complete(self) -> list[TensorRule]:
        used = [key for rule in self._rules for key in rule.ours]
        assert sorted(used) == sorted(self.shapes), f"{set(used) ^ set(self.shapes)} have no rule, or two"
        return self._rules
