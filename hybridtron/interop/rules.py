"""Rules that convert between checkpoint tensors and another format's tensors, in both directions.

In names, `ours` means hybridtron's checkpoints, and `theirs` means the other format (transformers or
state-spaces/mamba). Our checkpoints store each projection as a separate tensor, but other formats fuse some projections
into one tensor. So exports concatenate our tensors along dimension 0, and imports split the fused tensor into the same
rows. Experts' gates and ups are concatenated along dimension 1, because dimension 0 counts the experts.

Qwen3-Next is an exception in two ways. In a fused tensor, all projections' rows for head 0 come first, then all rows
for head 1, and so on. And each norm's weight is stored minus 1.

In a mixture of experts our tensor has the matrices of all experts, with the expert's index as axis 0. Files of most
formats have a tensor for each expert. Then each expert has a rule, and the rules for one of our tensors follow each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from hybridtron.architecture.base import Names
from hybridtron.architecture.table import Architecture, weight_name

CONVOLUTION = "conv1d.weight"
EACH_EXPERT = "*"  # stands for an expert's index in a name
ROUNDING = 2.0**-23  # relative rounding error of fp32 near 1


@dataclass(frozen=True)
class TensorRule:
    """A tensor in the other format, and our tensors. Concatenated along dimension `axis`, ours form the other tensor.

    theirs    the tensor's name in the other format's files
    shape     the tensor's shape in the other format
    ours      our tensors' keys, in the order of concatenation
    rows      how many rows each of our tensors has along `axis`, in the order of `ours`
    fp32      True if the tensor is always stored in fp32, even if other tensors are exported in bf16
    blocks    number of blocks, such as heads, in the concatenated tensor. Each of our tensors is divided into this
              number of equal parts, and a block consists of a part of each tensor
    less_one  True for a norm whose weight is stored minus 1. The conversion is in fp32: bf16 would round values near 1
    also      the tensor's second name, which some files have instead of `theirs`, or ""
    memory    the parameter's name in the transformers module, which peft uses, or "" if this name equals `theirs`
    expert    the expert's index along axis 0 of our tensor, or None if the tensor does not belong to one expert
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
    expert: int | None = None
    axis: int = 0

    @property
    def in_memory(self) -> str:
        """The parameter's name in the transformers module."""
        return self.memory or self.theirs

    def to_theirs(self, read: Callable[[str], Tensor]) -> Tensor:
        """Build the other format's tensor from ours. `read` returns a tensor of ours by its key."""
        if self.expert is not None:
            return read(self.ours[0])[self.expert]
        parts = [read(key).unflatten(self.axis, (self.blocks, -1)) for key in self.ours]
        fused = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis + 1)).reshape(self.shape)
        if self.less_one:
            return fused.float() - 1
        return fused

    def to_ours(self, theirs: Tensor) -> dict[str, Tensor]:
        """Split the other format's tensor. Return key -> tensor for our tensors, in fp32 if `fp32` is True."""
        assert self.expert is None, "an expert's tensor is only a part of ours: use ours_of"
        axis = self.axis
        if self.theirs.endswith(CONVOLUTION):
            theirs = theirs.squeeze(1)
        parts = theirs.unflatten(axis, (self.blocks, -1)).split([rows // self.blocks for rows in self.rows], axis + 1)
        ours = {key: part.flatten(axis, axis + 1) for key, part in zip(self.ours, parts, strict=True)}
        if self.fp32:
            converted = {key: part.float() for key, part in ours.items()}
        else:
            converted = ours
        if self.less_one:
            return {key: part + 1 for key, part in converted.items()}
        return converted

    def same(self, rebuilt: Tensor, theirs: Tensor) -> bool:
        """Return True if a tensor, converted to ours and back, equals the original tensor `theirs`.

        The tensors must be equal bit for bit, or up to fp32 rounding if `less_one` is True.
        """
        if self.less_one:
            return torch.allclose(rebuilt, theirs.float(), rtol=ROUNDING, atol=ROUNDING)
        return torch.equal(rebuilt.to(theirs.dtype), theirs)

    def as_named(self, names: Container[str]) -> TensorRule:
        """Return the rule for a file with these names: `also` replaces `theirs` if only `also` is in `names`."""
        if self.also in names and self.theirs not in names:
            return replace(self, theirs=self.also)
        return self


def together(rules: Sequence[TensorRule]) -> list[list[TensorRule]]:
    """Divide rules into lists: a list for the experts in each of our tensors, and a list for each other rule."""
    return [list(same) for _, same in groupby(rules, key=lambda rule: rule.ours)]


def ours_of(rules: Sequence[TensorRule], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return key -> tensor for our tensors to which a list from `together` belongs.

    `read` returns a tensor of the other format by its name.
    """
    first = rules[0]
    if first.expert is None:
        return first.to_ours(read(first.theirs))
    return {first.ours[0]: torch.stack([read(rule.theirs) for rule in rules])}


def remembering(read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Return `read` with a cache of one tensor, because the rules of consecutive experts read the same tensor."""
    return lru_cache(maxsize=1)(read)


class Rules:
    """A collection of the rules for a model's tensors."""

    def __init__(self, arch: Architecture) -> None:
        table = arch.table
        self._arch = arch
        self.shapes = {key: shape for name, weight in table.items() for key, shape in weight.stored(name).items()}
        self._axes = {key: weight.parts_axis for name, weight in table.items() for key in weight.stored(name)}
        self._fp32 = {name for name, weight in table.items() if weight.fp32}
        self._rules: list[TensorRule] = []
        self._used: set[str] = set()

    def add(self, theirs: str, *ours: str) -> None:
        """Add the rule for the tensor `theirs`, which is formed by concatenating our tensors.

        A convolution has our shape (channels, kernel size), and the shape (channels, 1, kernel size) in other formats.
        """
        self._used.update(ours)
        axis = self._axes[ours[0]]
        first = self.shapes[ours[0]]
        rows = tuple(self.shapes[key][axis] for key in ours)
        shape = (*first[:axis], sum(rows), *first[axis + 1 :])
        if theirs.endswith(CONVOLUTION):
            shape = (shape[0], 1, *shape[1:])
        self._rules.append(TensorRule(theirs, shape, ours, rows, ours[0] in self._fp32, axis=axis))

    def add_experts(self, theirs: str, ours: str) -> None:
        """Add a rule for each expert in one of our tensors. In `theirs`, EACH_EXPERT stands for the expert's index."""
        self._used.add(ours)
        experts, *shape = self.shapes[ours]
        for expert in range(experts):
            name = theirs.replace(EACH_EXPERT, str(expert))
            self._rules.append(TensorRule(name, tuple(shape), (ours,), (experts,), False, expert=expert))

    def add_mixer(self, theirs: str, index: int, names: Names | None = None) -> None:
        """Add the rules for the weights of a sub-layer (attention, Mamba, MLP, ...), with names under `theirs`.

        `names` maps names in the other format to our keys; the default is `exported_names` of the sub-layer's spec.
        Names of weights that the sub-layer does not have are ignored. Weights that several sub-layers share get a
        single rule. A name with EACH_EXPERT gets a rule for each expert.
        """
        if names is None:
            names = self._arch.specs[index].exported_names(self._arch.sizes)
        for name, keys in names.items():
            ours = [weight_name(self._arch, index, key) for key in keys]
            if ours[0] not in self.shapes or ours[0] in self._used:  # another sub-layer may share these weights
                continue
            if EACH_EXPERT in name:
                self.add_experts(f"{theirs}.{name}", ours[0])
            else:
                self.add(f"{theirs}.{name}", *ours)

    def complete(self) -> list[TensorRule]:
        """Return all rules, after checking that each weight is in exactly one rule."""
        used = [key for rule in self._rules if not rule.expert for key in rule.ours]  # of experts only the first
        assert sorted(used) == sorted(self.shapes), (
            f"weights without a rule, or with two: {set(used) ^ set(self.shapes)}"
        )
        return self._rules
