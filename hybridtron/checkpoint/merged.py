"""A checkpoint whose low-rank adapters (LoRA, DoRA) are merged into the weights as the weights are read.

The merged weight is W + (alpha / rank) B A: W is the weight, and A and B are the adapter's low-rank matrices. DoRA also
has a learned vector M. It rescales each row i of the sum, such that the row's norm is the norm of W's row i, plus M_i.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hybridtron.architecture.adapters import AdaptersConfig, adapter_key, is_adapter
from hybridtron.checkpoint.checkpoint import MASTER, Checkpoint, fill_rectangles
from hybridtron.config.schema import Config
from hybridtron.parallel.dora import factors


@dataclass(frozen=True)
class MergedCheckpoint(Checkpoint):
    """A checkpoint with adapters that can be read like a checkpoint without adapters.

    Weights are merged in fp32 or a wider dtype, from fp32 masters if the checkpoint has masters. Only the result is
    rounded to the weight's dtype, and not even the result by `unrounded`.
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
        return self._merged_weight(key, *pair).to(self.dtype(key))

    def unrounded(self, key: str) -> Tensor:
        """Read a full weight, merged with its adapter in fp32 or wider and not rounded to the weight's dtype."""
        if (pair := adapter_pair(self._chunks, key)) is None:
            return super().unrounded(key)
        return self._merged_weight(key, *pair)

    def _fill(self, key: str, wanted: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        if (pair := adapter_pair(self._chunks, key)) is None:
            super()._fill(key, wanted)
        else:
            fill_rectangles(self._merged_weight(key, *pair), wanted)

    def _merged_weight(self, key: str, A: str, B: str) -> Tensor:
        """Return a weight merged with its adapter, in fp32 or wider; `A` and `B` are the matrices' keys."""
        down, up = (super(MergedCheckpoint, self).whole(self.widest(matrix)) for matrix in (A, B))
        weight = super().whole(self.widest(key))
        scale = self.adapters.alpha / self.adapters.rank
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight = weight.to(wide)
        adapted = weight + scale * (up.to(wide) @ down.to(wide))
        if not self.adapters.dora:
            return adapted
        M = super().whole(self.widest(B.replace(".adapter.B", ".adapter.M")))
        norms, adapted_norms = (
            torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64) for matrix in (weight, adapted)
        )
        return factors(M.to(wide), norms, adapted_norms)[:, None] * adapted


def adapter_pair(stored_keys: Container[str], key: str) -> tuple[str, str] | None:
    """Return the keys for a weight's adapter matrices A and B, or None if the weight has no adapter.

    `key` is the key of a weight or its fp32 master.
    """
    A, B = (adapter_key(key.removeprefix(MASTER), matrix) for matrix in "AB")
    if is_adapter(A) and A in stored_keys:
        return (A, B)
    return None


def merge_adapters(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that merges its adapters as weights are read.

    A checkpoint without adapters is returned unchanged.
    """
    adapters = checkpoint.config.model.adapters
    if adapters is None:
        return checkpoint
    return MergedCheckpoint(checkpoint.folder, checkpoint.manifest, adapters)
