"""A mixture of experts against a dense SwiGLU MLP of the same active FLOPs, with its router, forward and backward.

Each token goes to TOP_K of EXPERTS experts; the dense MLP has as many hidden channels as a token's experts together.
The torch forms are the choice by a sort, and rows by torch's gathers, in place of compiled C++.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.experts import RouteInputs, Router, experts_mlp, route
from hybridtron.ops.product import LinearInputs, linear
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu
from hybridtron.proving.measuring import BenchReport, difference

EXPERTS = 8
TOP_K = 2
MOST = {torch.float32: 1.1, torch.bfloat16: 1.3}
"""Goals: the largest time over the dense MLP's, by dtype."""
TORCH = {
    "route": "reference",
    "expert_choice": "reference",
    "expert_order": "reference",
    "to_experts": "gathered",
    "from_experts": "gathered",
}


@dataclass(frozen=True)
class ExpertsBench:
    """The number of tokens, and pairs of a width and an expert's hidden channels."""

    tokens: int
    sizes: tuple[tuple[int, int], ...]


FULL = ExpertsBench(4096, ((192, 512), (256, 1024), (512, 1024), (512, 2048)))
QUICK = ExpertsBench(64, ((16, 32),))


def passes(tokens: int, width: int, hidden: int, dtype: torch.dtype) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Return functions that compute the output and all gradients of the experts and of the dense MLP."""
    device = compute_device()
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        numbers = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return numbers.to(device, dtype).requires_grad_()

    x_TD = drawn(tokens, width)
    router_ED = drawn(EXPERTS, width, dtype=torch.float32)
    gate_up_EFD = drawn(EXPERTS, 2 * hidden, width)
    down_EDH = drawn(EXPERTS, width, hidden)
    wide_gate_up = drawn(2 * TOP_K * hidden, width)
    wide_down = drawn(width, TOP_K * hidden)
    grad_TD = drawn(tokens, width).detach()

    def mixture() -> tuple[Tensor, ...]:
        logits_TE = F.linear(x_TD.float(), router_ED)
        routing = route(RouteInputs(logits_TE, None, Router(TOP_K, normalise=True)))
        y_TD = experts_mlp(x_TD, routing, gate_up_EFD, down_EDH, "swiglu")
        return y_TD, *torch.autograd.grad(y_TD, (x_TD, router_ED, gate_up_EFD, down_EDH), grad_TD)

    def in_torch() -> tuple[Tensor, ...]:
        with force(**TORCH):
            return mixture()

    def dense() -> tuple[Tensor, ...]:
        hidden_TF = linear(LinearInputs(x_TD, wide_gate_up))
        y_TD = linear(LinearInputs(swiglu(SwiGLUInputs(hidden_TF)), wide_down))
        return y_TD, *torch.autograd.grad(y_TD, (x_TD, wide_gate_up, wide_down), grad_TD)

    return {"experts": mixture, "torch": in_torch, "dense": dense}


def experts(report: BenchReport) -> None:
    """Measure experts and the dense MLP at every size, in one run."""
    sizes = report.pick(full=FULL, quick=QUICK)
    report.device = compute_device().type
    forms = {}
    for dtype in MOST:
        for width, hidden in sizes.sizes:
            runs = passes(sizes.tokens, width, hidden, dtype)
            if dtype == torch.float32:
                difference(runs["experts"](), runs["torch"]())
            forms[dtype, width, hidden] = runs
    measured = report.sweep(forms)
    named = {f"{str(dtype)[6:]}, {width} x {hidden}": timed for (dtype, width, hidden), timed in measured.items()}
    report.ratios("time, over the dense MLP's", "sizes", named, [("experts", "dense"), ("torch", "dense")], {})
    for dtype, most in MOST.items():
        worst = max(timed.ratio("experts", "dense") for (other, *_), timed in measured.items() if other == dtype)
        report.at_most(f"{str(dtype)[6:]}: experts / dense, at the worst size", most, worst)
    report.notes += [
        f"{sizes.tokens} tokens, {EXPERTS} experts, {TOP_K} of them for each token; sizes are the width and the hidden "
        f"channels of an expert; the dense MLP has {TOP_K} times as many",
        f"forward and backward, with the router; {report.repetitions} rounds",
    ]
