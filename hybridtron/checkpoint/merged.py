"""A checkpoint as though its adapters had been added to the weights that they stand beside: W + (alpha / rank) B A.

With DoRA its rows have the lengths that were learned, |W| + M.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hybridtron.architecture.adapters import AdaptersConfig, adapter_key, is_adapter
from hybridtron.checkpoint.checkpoint import Checkpoint, fill_rectangles
from hybridtron.config.schema import Config
from hybridtron.parallel.magnitude import factors

MASTER = "master."


@dataclass(frozen=True)
class MergedCheckpoint(Checkpoint):
    """Its model has no adapters, and its adapted weights are what both make together, in fp32 at least until stored."""

    adapters: AdaptersConfig

    @cached_property
    def config(self) -> Config:
        config = super().config
        return replace(config, model=replace(config.model, adapters=None))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: shape for key, shape in super().shapes.items() if not is_adapter(key)}

    def whole(self, key: str) -> Tensor:
        if (pair := adapter_pair(self._chunks, key)) is None:
            return super().whole(key)
        return self._merged(key, *pair).to(self.dtype(key))

    def _fill(self, key: str, wanted: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        if (pair := adapter_pair(self._chunks, key)) is None:
            super()._fill(key, wanted)
        else:
            fill_rectangles(self._merged(key, *pair), wanted)

    def _merged(self, key: str, A: str, B: str) -> Tensor:
        down, up = (super(MergedCheckpoint, self).whole(self._widest(piece)) for piece in (A, B))
        weight = super().whole(self._widest(key))
        scale = self.adapters.alpha / self.adapters.rank
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight = weight.to(wide)
        made = weight + scale * (up.to(wide) @ down.to(wide))
        if not self.adapters.dora:
            return made
        M = super().whole(self._widest(B.replace(".adapter.B", ".adapter.M")))
        before, after = (torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in (weight, made))
        return factors(M.to(wide), before, after)[:, None] * made

    def _widest(self, key: str) -> str:
        master = f"{MASTER}{key.removeprefix(MASTER)}"
        return master if master in self._chunks else key


def adapter_pair(held: Container[str], key: str) -> tuple[str, str] | None:
    """The keys of A and B beside a weight, or beside its master; None where it has no adapter."""
    A, B = (adapter_key(key.removeprefix(MASTER), piece) for piece in "AB")
    return (A, B) if is_adapter(A) and A in held else None


def merged(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, of a model without adapters."""
    adapters = checkpoint.config.model.adapters
    return checkpoint if adapters is None else MergedCheckpoint(checkpoint.folder, checkpoint.manifest, adapters)
