"""A mixer of ours and its peer with the same weights: timed side by side, and held to the same results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer
from hybridtron.proving.measuring import BenchSettings, BenchTable, Contender, Timing, interleaved, times

TOLERANCE = 1e-5
OfPeer = Callable[[Mapping[str, Tensor], str], Tensor]
"""The peer's tensor, of those by its names, that stands for one of ours."""


class Pair:
    """Both mixers, and one forward and backward pass of either on a row of a given length."""

    def __init__(self, ours: Mixer, peer: nn.Module, width: int, of_peer: OfPeer) -> None:
        self.ours, self.peer, self.width, self.of_peer = ours, peer, width, of_peer
        theirs = dict(peer.named_parameters())
        with torch.no_grad():
            for name, weight in ours.named_parameters():
                weight.copy_(of_peer(theirs, name).reshape(weight.shape))
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
        gradients = {name: self.of_peer(theirs, name) for name, _ in self.ours.named_parameters()}
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


def against_peer(
    pair: Pair, rounds_of_peer: Mapping[int, int], settings: BenchSettings
) -> tuple[BenchTable, dict[int, float], list[str]]:
    """The table of both, how many times longer the peer takes at each length, and lines for the console."""
    cells, ratios, console = [], {}, []
    for length, rounds in rounds_of_peer.items():
        x, grad = pair.row(length)
        peer = Contender(lambda x=x, grad=grad: pair.run_peer(x, grad), min(rounds, settings.repetitions))
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
    title = f"against transformers' {type(pair.peer).__name__}"
    header = (
        "tokens",
        "transformers' time / ours",
        "rounds",
        "median over fastest",
        "outputs differ",
        "gradients differ",
    )
    return BenchTable(title, header, cells), ratios, console


def alone(
    pair: Pair, lengths: Sequence[int], settings: BenchSettings
) -> tuple[BenchTable, dict[str, Timing], list[str]]:
    """Our time at each length over that at the first one, the times themselves, and lines for the console."""
    timings = interleaved({str(length): ours_at(pair, length, settings) for length in lengths})
    base = timings[str(lengths[0])].fastest
    cells = [
        (length, f"{int(length) / lengths[0]:g}x", times(timing.fastest / base), f"+{timing.spread:.0%}")
        for length, timing in timings.items()
    ]
    rows = BenchTable("linear in the length", ("tokens", "length", "our time", "median over fastest"), cells)
    return rows, timings, [f"ours at {length}: {timing}" for length, timing in timings.items()]


def ours_at(pair: Pair, length: int, settings: BenchSettings) -> Contender:
    x, grad = pair.row(length)
    return Contender(lambda: pair.run_ours(x, grad), settings.repetitions)


NOTE = (
    "rounds and medians are those of ours / transformers; differences are the largest of any entry, as a share of "
    "the largest entry"
)
