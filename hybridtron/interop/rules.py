"""Rules that map checkpoint tensors to another format's: one table for both directions.

`ours` is hybridtron, `theirs` the other format (transformers or state-spaces/mamba). A checkpoint stores each part of a
projection under its own key, and the other formats fuse some parts into one tensor. Exports therefore concatenate our
tensors along dimension 0, and imports split the fused tensor at the same rows. Qwen3-Next fuses head by head (the rows
of all parts for head 0, then for head 1, ...) and stores norm weights minus 1. Shapes follow from the configuration
alone, so they are known before any tensor is read.
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
ROUNDING = 2.0**-23  # relative rounding error of fp32 near 1


@dataclass(frozen=True)
class TensorRule:
    """One tensor of the other format, and the checkpoint tensors that are concatenated to form it.

    theirs    its name in files
    shape     its shape
    ours      our keys, in the order in which they are concatenated along dimension 0
    rows      each of our tensors' number of rows
    fp32      whether it stays in fp32, whatever the export's dtype
    blocks    number of blocks into which the rows are divided; in each block the parts are concatenated
    less_one  for norms: our weight is 1 + theirs. It is computed in fp32, as bf16 would round values near 1
    also      a second name that some files use, or ""
    memory    the parameter's name in transformers' module if it differs from `theirs`; peft names adapters by it
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
        """The parameter's name in transformers' module."""
        return self.memory or self.theirs

    def to_theirs(self, read: Callable[[str], Tensor]) -> Tensor:
        """Build the other format's tensor from our tensors; `read` returns one by its key."""
        parts = [read(key).unflatten(0, (self.blocks, -1)) for key in self.ours]
        fused = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).reshape(self.shape)
        if self.less_one:
            return fused.float() - 1
        return fused

    def to_ours(self, theirs: Tensor) -> dict[str, Tensor]:
        """Split the other format's tensor into our tensors by key; converted to fp32 if the rule says so."""
        if self.theirs.endswith(CONVOLUTION):
            other_axes = self.shape[2:]
        else:
            other_axes = self.shape[1:]
        parts = theirs.unflatten(0, (self.blocks, -1)).split([rows // self.blocks for rows in self.rows], dim=1)
        ours = {key: part.reshape(-1, *other_axes) for key, part in zip(self.ours, parts, strict=True)}
        if self.fp32:
            converted = {key: part.float() for key, part in ours.items()}
        else:
            converted = ours
        if self.less_one:
            return {key: part + 1 for key, part in converted.items()}
        return converted

    def same(self, made: Tensor, theirs: Tensor) -> bool:
        """Compare a rebuilt tensor with the original: bit for bit, or within fp32 rounding if `less_one` is set."""
        if self.less_one:
            return torch.allclose(made, theirs.float(), rtol=ROUNDING, atol=ROUNDING)
        return torch.equal(made.to(theirs.dtype), theirs)

    def as_named(self, names: Container[str]) -> TensorRule:
        """Return the rule under its second name if only that one is among `names`."""
        if self.also in names and self.theirs not in names:
            return replace(self, theirs=self.also)
        return self


class Rules:
    """Collects a model's rules; `complete` checks that they use each of its weights exactly once."""

    def __init__(self, model: ModelConfig) -> None:
        table = parameter_table(model)
        self._arch = architecture(model)
        self.shapes = {key: shape for name, weight in table.items() for key, shape in weight.stored(name).items()}
        self._fp32 = {name for name, weight in table.items() if weight.fp32}
        self._rules: list[TensorRule] = []
        self._used: set[str] = set()

    def add(self, theirs: str, *ours: str) -> None:
        """Add a rule that concatenates our tensors into one. Our convolutions (channels, taps) are (channels, 1, taps)
        in other formats."""
        self._used.update(ours)
        rows = tuple(self.shapes[key][0] for key in ours)
        shape = (sum(rows), *self.shapes[ours[0]][1:])
        if theirs.endswith(CONVOLUTION):
            shape = (shape[0], 1, *shape[1:])
        self._rules.append(TensorRule(theirs, shape, ours, rows, ours[0] in self._fp32))

    def add_mixer(self, theirs: str, index: int, names: Names | None = None) -> None:
        """Add the rules for a sub-layer's mixer, under the prefix `theirs`.

        `names` maps names in the other format to our keys; the default is the spec's `exported_names`. Names of weights
        that this mixer lacks are ignored. Shared weights get a rule at their first place only.
        """
        if names is None:
            names = self._arch.specs[index].exported_names(self._arch.sizes)
        for name, keys in names.items():
            ours = [weight_name(self._arch, index, key) for key in keys]
            if ours[0] in self.shapes and ours[0] not in self._used:  # a later place finds its shared weights used
                self.add(f"{theirs}.{name}", *ours)

    def complete(self) -> list[TensorRule]:
        """Return all rules, after checking that each weight is in exactly one."""
        used = [key for rule in self._rules for key in rule.ours]
        assert sorted(used) == sorted(self.shapes), f"{set(used) ^ set(self.shapes)} have no rule, or two"
        return self._rules
