"""A checkpoint with its adapters merged into the adapted weights when they are read: W + (alpha / rank) B A.

With DoRA each row of that sum is then scaled to its learned length, |W| + M.
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
    """A checkpoint with adapters that reads like a checkpoint without them.

    Adapted weights are computed in fp32 or wider, from masters where there are any, and rounded to their stored dtype
    only at the end.
    """

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
        """Compute an adapted weight from the weight and its adapter, in fp32 or wider."""
        down, up = (super(MergedCheckpoint, self).whole(self._widest(piece)) for piece in (A, B))
        weight = super().whole(self._widest(key))
        scale = self.adapters.alpha / self.adapters.rank
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight = weight.to(wide)
        adapted = weight + scale * (up.to(wide) @ down.to(wide))
        if not self.adapters.dora:
            return adapted
        M = super().whole(self._widest(B.replace(".adapter.B", ".adapter.M")))
        before, after = (torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64) for matrix in (weight, adapted))
        return factors(M.to(wide), before, after)[:, None] * adapted

    def _widest(self, key: str) -> str:
        """Return the key of a weight's fp32 master if there is one, else the weight's own."""
        master = f"{MASTER}{key.removeprefix(MASTER)}"
        if master in self._chunks:
            return master
        return key


def adapter_pair(held: Container[str], key: str) -> tuple[str, str] | None:
    """Return the keys of a weight's adapter matrices A and B; None if it has no adapter.

    `key` may also name the weight's master.
    """
    A, B = (adapter_key(key.removeprefix(MASTER), piece) for piece in "AB")
    if is_adapter(A) and A in held:
        return (A, B)
    return None


def merged(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with adapters merged into its weights; without adapters it is returned unchanged."""
    adapters = checkpoint.config.model.adapters
    if adapters is None:
        return checkpoint
    return MergedCheckpoint(checkpoint.folder, checkpoint.manifest, adapters)
