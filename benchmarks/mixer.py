"""The Mamba-1 mixer against transformers' MambaMixer (its plain PyTorch path), forward and backward, same weights.

The peer's loop over the tokens indexes the whole row, and the gradient of every index is as long as the row: its time
grows with the square of the length. Ours is linear, which the second table shows. Every timed pass of both is also
compared: outputs, and gradients of the input and of every weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.mamba import MambaSpec
from hybridtron.mixers.mamba import Mamba
from hybridtron.parallel.linear import SINGLE_RANK
from hybridtron.proving.measuring import BenchReport, BenchSettings, Goal, Timing

from .pair import NOTE, Pair, against_peer, alone

PEER_NAMES = {"conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias", "dt_bias": "dt_proj.bias"}


@dataclass(frozen=True)
class Sizes:
    """What is measured. `peer` maps a length to how many rounds the peer gets there."""

    width: int
    state: int
    peer: dict[int, int]
    ours: tuple[int, ...]


FULL = Sizes(width=256, state=16, peer={256: 5, 512: 5, 1024: 2}, ours=(1024, 2048, 4096, 8192))
QUICK = Sizes(width=16, state=4, peer={16: 2, 32: 2, 64: 1}, ours=(64, 128))


def bench(settings: BenchSettings) -> BenchReport:
    """Ours against the peer where the peer can go, and ours alone beyond."""
    sizes = QUICK if settings.quick else FULL
    config = MambaConfig(hidden_size=sizes.width, state_size=sizes.state, num_hidden_layers=1)
    ours = Mamba(MambaSpec(state=sizes.state), ModelSizes(sizes.width, num_sublayers=1), SINGLE_RANK)
    peer = MambaMixer(config, layer_idx=0)
    pair = Pair(ours, peer, sizes.width, lambda theirs, name: theirs[PEER_NAMES.get(name, name)])
    both, ratios, console = against_peer(pair, sizes.peer, settings)
    growth, timings, more = alone(pair, sizes.ours, settings)
    notes = [
        f"batch 1, width {sizes.width}, inner width {2 * sizes.width}, state {sizes.state}, fp32, forward and backward",
        NOTE,
    ]
    goals = [] if settings.quick else _goals(ratios, timings)
    return BenchReport("Mamba-1 mixer", "cpu", [both, growth], goals, notes, console + more)


def _goals(ratios: dict[int, float], timings: dict[str, Timing]) -> list[Goal]:
    return [
        Goal.at_least("times faster than transformers at 512 tokens", 10, ratios[512]),
        Goal.at_least("times faster than transformers at 1024 tokens", 100, ratios[1024]),
        Goal.at_most("our time at 4096 / our time at 1024", 4.4, timings["4096"].fastest / timings["1024"].fastest),
    ]
