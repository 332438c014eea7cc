"""The Mamba-1 mixer against transformers' MambaMixer (its plain PyTorch path), forward and backward, same weights.

The peer's loop over the tokens indexes the whole row, and the gradient of every index is as long as the row: its time
grows with the square of the length. Ours is linear, which the second table shows. Every timed pass of both is also
compared: outputs, and gradients of the input and of every weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.mamba import Mamba
from hybridtron.parallel.linear import ALONE
from hybridtron.specs.base import ModelSizes
from hybridtron.specs.mamba import MambaSpec
from tools.bench_report import Form, Goal, Report, Rows, Settings, Timing, interleaved, times

TOLERANCE = 1e-5
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


class Pair:
    """Both mixers with the same weights, and one forward and backward pass of either on a row of a given length."""

    def __init__(self, sizes: Sizes) -> None:
        config = MambaConfig(hidden_size=sizes.width, state_size=sizes.state, num_hidden_layers=1)
        self.peer = MambaMixer(config, layer_idx=0)
        self.ours = Mamba(MambaSpec(state=sizes.state), ModelSizes(sizes.width, num_sublayers=1), ALONE)
        self.width = sizes.width
        theirs = dict(self.peer.named_parameters())
        with torch.no_grad():
            for name, weight in self.ours.named_parameters():
                weight.copy_(theirs[_peer_name(name)].reshape(weight.shape))
        self.results: dict[str, dict[str, Tensor]] = {}

    def row(self, length: int) -> tuple[Tensor, Tensor]:
        """An input (L, 1, D), and the gradient that a loss averaged over the tokens would send back."""
        generator = torch.Generator().manual_seed(length)
        x_LBD = torch.randn(length, 1, self.width, generator=generator)
        return x_LBD, torch.randn(length, 1, self.width, generator=generator) / length

    def run_ours(self, x_LBD: Tensor, grad_LBD: Tensor) -> None:
        x_LBD = x_LBD.clone().requires_grad_()
        self.ours.zero_grad()
        y_LBD = self.ours(x_LBD, None, SeqInfo.stream(1, len(x_LBD))).y_LBD
        y_LBD.backward(grad_LBD)
        gradients = {name: _gradient(weight) for name, weight in self.ours.named_parameters()}
        self.results["ours"] = {"output": y_LBD.detach(), "x": _gradient(x_LBD), **gradients}

    def run_peer(self, x_LBD: Tensor, grad_LBD: Tensor) -> None:
        x_BLD = x_LBD.transpose(0, 1).clone().requires_grad_()
        self.peer.zero_grad()
        y_BLD = self.peer(x_BLD)
        y_BLD.backward(grad_LBD.transpose(0, 1))
        theirs = {name: _gradient(weight) for name, weight in self.peer.named_parameters()}
        gradients = {name: theirs[_peer_name(name)] for name, _ in self.ours.named_parameters()}
        of_input = _gradient(x_BLD).transpose(0, 1)
        self.results["peer"] = {"output": y_BLD.detach().transpose(0, 1), "x": of_input, **gradients}

    def differences(self) -> tuple[float, float]:
        """The largest difference of the last passes' outputs and gradients, each as a share of its largest entry."""
        ours, peer = self.results["ours"], self.results["peer"]
        shares = {}
        for name, theirs in peer.items():
            difference = (ours[name] - theirs.reshape(ours[name].shape)).abs().max()
            shares[name] = (difference / theirs.abs().max()).item()
        return shares.pop("output"), max(shares.values())


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _peer_name(name: str) -> str:
    return PEER_NAMES.get(name, name)


def bench(settings: Settings) -> Report:
    """Ours against the peer where the peer can go, and ours alone beyond."""
    sizes = QUICK if settings.quick else FULL
    pair = Pair(sizes)
    cells, ratios, console = [], {}, []
    for length, rounds in sizes.peer.items():
        x, grad = pair.row(length)
        peer = Form(lambda x=x, grad=grad: pair.run_peer(x, grad), min(rounds, settings.repetitions))
        measured = interleaved({"ours": ours_at(pair, length, settings), "transformers": peer})
        of_output, of_gradients = pair.differences()
        assert max(of_output, of_gradients) <= TOLERANCE, f"the mixers differ by {max(of_output, of_gradients):.1e}"
        ratios[length] = measured["transformers"].fastest / measured["ours"].fastest
        rounds_text = " / ".join(str(len(timing.seconds)) for timing in measured.values())
        spreads = " / ".join(f"+{timing.spread:.0%}" for timing in measured.values())
        cells.append(
            (f"{length}", times(ratios[length]), rounds_text, spreads, f"{of_output:.0e}", f"{of_gradients:.0e}")
        )
        console += [f"{name} at {length}: {timing}" for name, timing in measured.items()]
    header = (
        "tokens",
        "transformers' time / ours",
        "rounds",
        "median over fastest",
        "outputs differ",
        "gradients differ",
    )
    against = Rows("against transformers' MambaMixer", header, cells)
    alone = interleaved({str(length): ours_at(pair, length, settings) for length in sizes.ours})
    console += [f"ours at {length}: {timing}" for length, timing in alone.items()]
    notes = [
        f"batch 1, width {sizes.width}, inner width {2 * sizes.width}, state {sizes.state}, fp32, forward and backward",
        "rounds and medians are those of ours / transformers; differences are the largest of any entry, as a share of "
        "the largest entry",
    ]
    goals = [] if settings.quick else _goals(ratios, alone)
    return Report("Mamba-1 mixer", "cpu", [against, growth(alone)], goals, notes, console)


def ours_at(pair: Pair, length: int, settings: Settings) -> Form:
    x, grad = pair.row(length)
    return Form(lambda: pair.run_ours(x, grad), settings.repetitions)


def growth(alone: dict[str, Timing]) -> Rows:
    """Our time at each length over that at the first one."""
    shortest, base = next((int(length), timing.fastest) for length, timing in alone.items())
    cells = [
        (length, f"{int(length) / shortest:g}x", times(timing.fastest / base), f"+{timing.spread:.0%}")
        for length, timing in alone.items()
    ]
    return Rows("linear in the length", ("tokens", "length", "our time", "median over fastest"), cells)


def _goals(ratios: dict[int, float], alone: dict[str, Timing]) -> list[Goal]:
    return [
        Goal.at_least("times faster than transformers at 512 tokens", 10, ratios[512]),
        Goal.at_least("times faster than transformers at 1024 tokens", 100, ratios[1024]),
        Goal.at_most("our time at 4096 / our time at 1024", 4.4, alone["4096"].fastest / alone["1024"].fastest),
    ]
