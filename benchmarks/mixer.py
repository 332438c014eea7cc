"""The Mamba mixers against transformers' plain PyTorch paths, forward and backward, with the same weights.

Mamba-1: the peer's loop over the tokens indexes the full row, and the gradient of every index is as long as the row:
its time grows with the square of the length. Ours is linear. Mamba-2: both are chunked and linear in the length; the
peer repeats B and C for every head, keeps intermediate tensors for backward, and makes its decays by sums over chunk x
chunk matrices. Before the timing, outputs and gradients of the input and of every weight are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Mamba2Config, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.mamba import MambaSpec
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, build_mixer
from hybridtron.ops.dispatch import force
from hybridtron.ops.product import LinearInputs, linear
from hybridtron.ops.registry import torch_alone
from hybridtron.parallel.linear import SINGLE_RANK
from hybridtron.proving.measuring import BenchReport, Timings, difference, per_token, times

PEER_NAMES = {"conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias", "dt_bias": "dt_proj.bias"}
TORCH = "ours by torch alone"
PRODUCTS = {"our products": "ours", "their products": "transformers"}
"""The projections of a mixer alone, forward and backward: a floor that neither can go below."""
OfPeer = Callable[[Mapping[str, Tensor], str], Tensor]
"""Finds, among the peer's tensors by name, the one that corresponds to a weight of ours."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured rows. The peer is measured up to `most` tokens."""

    width: int
    state: int
    lengths: tuple[int, ...]
    most: int


MAMBA = Sizes(width=256, state=16, lengths=(256, 512, 1024, 2048, 4096, 8192), most=1024)
MAMBA2 = Sizes(width=256, state=128, lengths=(512, 1024, 2048, 4096, 8192, 16384), most=8192)
QUICK = Sizes(width=16, state=4, lengths=(16, 32, 64, 128), most=32)


def mixer(report: BenchReport) -> None:
    """Measure Mamba-1 against transformers."""
    sizes = report.pick(full=MAMBA, quick=QUICK)
    peer = MambaMixer(MambaConfig(hidden_size=sizes.width, state_size=sizes.state, num_hidden_layers=1), layer_idx=0)
    ours = build_mixer(MambaSpec(state=sizes.state), ModelSizes(sizes.width, num_sublayers=1), SINGLE_RANK)
    pair = Pair(ours, peer, lambda theirs, name: theirs[PEER_NAMES.get(name, name)])
    measured = compare(report, pair, sizes)
    report.notes.append(
        f"batch 1, width {sizes.width}, inner width {2 * sizes.width}, state {sizes.state}, fp32, forward and backward"
    )
    if report.quick:
        return
    for length, limit in ((512, 10), (1024, 100)):
        ratio = measured[length].ratio("transformers", "ours")
        report.at_least(f"times faster than transformers at {length} tokens", limit, ratio)
    report.at_least("times faster than by torch alone at 1024 tokens", 3, measured[1024].ratio(TORCH, "ours"))
    growth = measured[4096]["ours"].fastest / measured[1024]["ours"].fastest
    report.at_most("our time at 4096 / our time at 1024", 4.4, growth)


def mamba2_mixer(report: BenchReport) -> None:
    """Measure Mamba-2 against transformers."""
    sizes = report.pick(full=MAMBA2, quick=QUICK)
    inner = 2 * sizes.width
    head_dim = sizes.width // 4
    config = Mamba2Config(
        hidden_size=sizes.width,
        state_size=sizes.state,
        head_dim=head_dim,
        num_heads=inner // head_dim,
        n_groups=1,
        num_hidden_layers=1,
    )
    spec = Mamba2Spec(state=sizes.state, head_dim=head_dim)
    ours = build_mixer(spec, ModelSizes(sizes.width, num_sublayers=1), SINGLE_RANK)
    pair = Pair(ours, Mamba2Mixer(config, layer_idx=0), of_mamba2(inner, sizes.state))
    measured = compare(report, pair, sizes)
    report.notes.append(
        f"batch 1, width {sizes.width}, {inner // head_dim} heads of {head_dim}, state {sizes.state}, 1 group, fp32, "
        f"forward and backward; the peer's chunks are {config.chunk_size} tokens, its default"
    )
    if report.quick:
        return
    for length in (512, 2048, 8192):
        ratio = measured[length].ratio("transformers", "ours")
        report.at_least(f"times faster than transformers at {length} tokens", 5, ratio)
    growth = measured[16384]["ours"].fastest / measured[1024]["ours"].fastest
    report.at_most("our time at 16384 / our time at 1024", 17.6, growth)


def of_mamba2(inner: int, both: int) -> OfPeer:
    """Return a function that finds the peer's tensor for each of our Mamba-2 weights.

    The peer has one in_proj (z, x, B, C, dt) and one conv1d, with `inner` channels, and `both` for each of B and C.
    """
    z_x = slice(2 * inner)
    b_c = slice(2 * inner, 2 * inner + 2 * both)
    dt = slice(2 * inner + 2 * both, None)

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
        return theirs[{"norm_weight": "norm.weight"}.get(name, name)]

    return find


class Pair:
    """Both mixers with the same weights, and either one's forward and backward pass on a row.

    A pass returns the output, and the gradients in the order of our weights.
    """

    def __init__(self, ours: Mixer, peer: nn.Module, of_peer: OfPeer) -> None:
        self.ours = ours
        self.peer = peer
        self.of_peer = of_peer
        theirs = dict(peer.named_parameters())
        with torch.no_grad():
            for name, weight in ours.named_parameters():
                weight.copy_(of_peer(theirs, name).reshape(weight.shape))

    def run_ours(self, x_LBD: Tensor, grad_LBD: Tensor) -> list[Tensor]:
        weights = dict(self.ours.named_parameters())
        y_LBD = self.ours(x_LBD, None, SeqInfo.stream(1, len(x_LBD))).y_LBD
        return [y_LBD.detach(), *torch.autograd.grad(y_LBD, [x_LBD, *weights.values()], grad_LBD)]

    def run_torch(self, x_LBD: Tensor, grad_LBD: Tensor) -> list[Tensor]:
        """Run our mixer without compiled forms."""
        with force(**torch_alone()):
            return self.run_ours(x_LBD, grad_LBD)

    def run_products(self, length: int, own: bool) -> None:
        """Run all projections alone, forward and backward, by our op or the peer's."""
        for name, weight in self.ours.named_parameters():
            if not name.endswith("proj.weight"):
                continue
            x_LBD = torch.ones(length, 1, weight.shape[1], requires_grad=True)
            if own:
                y_LBO = linear(LinearInputs(x_LBD, weight))
            else:
                y_LBO = functional.linear(x_LBD, weight)
            torch.autograd.grad(y_LBO, [x_LBD, weight], y_LBO)

    def run_peer(self, x_LBD: Tensor, grad_LBD: Tensor) -> list[Tensor]:
        weights = dict(self.peer.named_parameters())
        y_LBD = self.peer(x_LBD.transpose(0, 1)).transpose(0, 1)
        of_x, *gradients = torch.autograd.grad(y_LBD, [x_LBD, *weights.values()], grad_LBD)
        theirs = dict(zip(weights, gradients, strict=True))
        ours = self.ours.named_parameters()
        return [y_LBD.detach(), of_x, *(self.of_peer(theirs, name).reshape(w.shape) for name, w in ours)]


def compare(report: BenchReport, pair: Pair, sizes: Sizes) -> dict[int, Timings]:
    """Measure both mixers over the length; beyond the peer's longest row ours alone."""
    forms: dict[int, dict[str, Callable[[], object]]] = {}
    outputs = []
    gradients = []
    for length in sizes.lengths:
        generator = torch.Generator().manual_seed(length)
        x_LBD, grad_LBD = torch.randn(2, length, 1, sizes.width, generator=generator)
        x_LBD.requires_grad_()
        grad_LBD = grad_LBD / length  # as a loss averaged over the tokens would send back
        forms[length] = {"ours": partial(pair.run_ours, x_LBD, grad_LBD)}
        if length <= sizes.most:
            forms[length]["transformers"] = partial(pair.run_peer, x_LBD, grad_LBD)
            forms[length][TORCH] = partial(pair.run_torch, x_LBD, grad_LBD)
            forms[length] |= {name: partial(pair.run_products, length, name == "our products") for name in PRODUCTS}
            ours = pair.run_ours(x_LBD, grad_LBD)
            peer = pair.run_peer(x_LBD, grad_LBD)
            outputs.append(f"{difference(ours[:1], peer[:1]):.0e}")
            gradients.append(f"{difference(ours[1:], peer[1:]):.0e}")
    measured = report.sweep(forms)
    alone = [""] * (len(measured) - len(outputs))
    more = {"ours per token": per_token(measured, "ours")}
    more |= {"outputs differ": outputs + alone, "gradients differ": gradients + alone}
    more |= {"transformers / ours, without the products": without_products(measured)}
    pairs = [("transformers", "ours"), (TORCH, "ours"), *((name, form) for name, form in PRODUCTS.items())]
    report.ratios(f"against {type(pair.peer).__name__}", "tokens", measured, pairs, more)
    report.notes += [
        f"{report.repetitions} rounds of all forms and lengths; ours per token: over that of the first row",
        "differences are the largest of any entry, as a share of the largest entry",
    ]
    return measured


def without_products(measured: Mapping[int, Timings]) -> list[str]:
    """Return the peer's time over ours, after the time of the projections is subtracted from both."""
    ratios = []
    for timings in measured.values():
        if not timings.keys() >= PRODUCTS.keys():
            ratios.append("")
            continue
        ours, theirs = (timings[form].fastest - timings[name].fastest for name, form in PRODUCTS.items())
        ratios.append(times(theirs / ours))
    return ratios
