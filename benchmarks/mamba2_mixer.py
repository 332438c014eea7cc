"""The Mamba-2 mixer against transformers' Mamba2Mixer (its plain PyTorch path), forward and backward, same weights.

Both are chunked and linear in the length. The peer repeats B and C for every head, keeps what is between the products
for backward, and makes its decays by sums over chunk x chunk matrices. Every timed pass of both is also compared:
outputs, and gradients of the input and of every weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.mixers.mamba2 import Mamba2
from hybridtron.parallel.linear import SINGLE_RANK
from hybridtron.proving.measuring import BenchReport, BenchSettings, Goal, Timing

from .pair import NOTE, OfPeer, Pair, against_peer, alone


@dataclass(frozen=True)
class Sizes:
    """What is measured. `peer` maps a length to how many rounds the peer gets there."""

    width: int
    state: int
    head_dim: int
    peer: dict[int, int]
    ours: tuple[int, ...]


FULL = Sizes(256, 128, 64, peer={512: 5, 2048: 5, 8192: 3}, ours=(512, 1024, 2048, 4096, 8192, 16384))
QUICK = Sizes(16, 4, 8, peer={16: 2, 32: 2}, ours=(64, 128))


def of_peer(inner: int, both: int) -> OfPeer:
    """`inner` channels, and `both` for each of B and C; the peer has one in_proj (z, x, B, C, dt) and one conv1d."""
    z_x, b_c, dt = slice(2 * inner), slice(2 * inner, 2 * inner + 2 * both), slice(2 * inner + 2 * both, None)

    def find(theirs: Mapping[str, Tensor], name: str) -> Tensor:
        projection = theirs["in_proj.weight"]
        match name.split("_conv_"):
            case ["x", kind]:
                return theirs[f"conv1d.{kind}"][:inner]
            case ["bc", kind]:
                return theirs[f"conv1d.{kind}"][inner:]
        if name == "in_proj.weight":
            return torch.cat([projection[z_x], projection[dt]])
        if name == "bc_proj.weight":
            return projection[b_c]
        return theirs["norm.weight" if name == "norm_weight" else name]

    return find


def bench(settings: BenchSettings) -> BenchReport:
    """Ours against the peer, and ours alone over the length."""
    sizes = QUICK if settings.quick else FULL
    inner = 2 * sizes.width
    config = Mamba2Config(
        hidden_size=sizes.width,
        state_size=sizes.state,
        head_dim=sizes.head_dim,
        num_heads=inner // sizes.head_dim,
        n_groups=1,
        num_hidden_layers=1,
    )
    spec = Mamba2Spec(state=sizes.state, head_dim=sizes.head_dim)
    ours = Mamba2(spec, ModelSizes(sizes.width, num_sublayers=1), SINGLE_RANK)
    pair = Pair(ours, Mamba2Mixer(config, layer_idx=0), sizes.width, of_peer(inner, sizes.state))
    both, ratios, console = against_peer(pair, sizes.peer, settings)
    growth, timings, more = alone(pair, sizes.ours, settings)
    notes = [
        f"batch 1, width {sizes.width}, {inner // sizes.head_dim} heads of {sizes.head_dim}, state {sizes.state}, "
        f"1 group, fp32, forward and backward; the peer's chunks are {config.chunk_size} tokens, its default",
        NOTE,
    ]
    goals = [] if settings.quick else _goals(ratios, timings)
    return BenchReport("Mamba-2 mixer", "cpu", [both, growth], goals, notes, console + more)


def _goals(ratios: dict[int, float], timings: dict[str, Timing]) -> list[Goal]:
    growth = timings["16384"].fastest / timings["1024"].fastest
    faster = [
        Goal.at_least(f"times faster than transformers at {length} tokens", 1.5, ratio)
        for length, ratio in ratios.items()
    ]
    return [*faster, Goal.at_most("our time at 16384 / our time at 1024", 17.6, growth)]
