"""The recurrences whose state is a matrix, side by side: SSD, retention, gated linear attention, the delta rule.

All have as many heads, keys and values of the same size, and queries and keys of their own for each head, so that what
they read, write and carry is the same size. SSD's compiled form is the measure. Retention (RetNet) is SSD's recurrence
with a constant decay. By multiply-adds the delta rule does almost twice as much as SSD: its keys read as its queries
do, a triangular system is solved for every chunk, and its gradients go through both again.

Beside ours stand transformers' chunks of Gated DeltaNet and KDA in torch. flash-linear-attention's kernels need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import unwrap

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.dispatch import Op, force
from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.ssd import DecayInputs, SSDInputs, decay_scan, ssd_scan
from hybridtron.proving.measuring import BenchReport
from hybridtron.requirements import is_there

MEASURE = "SSD"
PACKAGE = "transformers"
GOAL = 4  # times SSD's, of the delta rule with one decay a head
GLA_GOAL = 2


@dataclass(frozen=True)
class Sizes:
    """H heads with K key and V value channels."""

    heads: int
    key: int
    value: int
    lengths: tuple[int, ...]


FULL = Sizes(8, 64, 64, (256, 1024, 4096))
QUICK = Sizes(2, 8, 8, (16, 32))


def forms(length: int, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """What is timed: forward and backward of one row, with gradients of all inputs."""
    generator = torch.Generator().manual_seed(length)
    tokens = (1, length, sizes.heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def decay(channels: int) -> Tensor:
        return -0.1 * normal(*tokens, channels).exp()

    q, k, v = normal(*tokens, sizes.key), normalize(normal(*tokens, sizes.key), dim=-1), normal(*tokens, sizes.value)
    A, D, bias = -torch.ones(sizes.heads), torch.zeros(sizes.heads), torch.zeros(sizes.heads)
    beta = normal(*tokens).sigmoid()
    ops = {
        MEASURE: (ssd_scan, SSDInputs(v, normal(*tokens) - 2, A, k, q, D, bias)),
        "retention": (decay_scan, DecayInputs(q, k, v, torch.full(tokens, -0.05))),
        "GLA": (gla_scan, GLAInputs(q, k, v, decay(sizes.key))),
        "delta by head": (delta_scan, DeltaInputs(q, k, v, beta, decay(1))),
        "delta by channel": (delta_scan, DeltaInputs(q, k, v, beta, decay(sizes.key))),
    }
    timed: dict[str, Callable[[], object]] = {}
    for name, (op, inputs) in ops.items():
        for form in (each.name for each in op.implementations if each.unavailable_reason("cpu") is None):
            timed[f"{name}, {form}"] = partial(forward_backward, op, form, inputs)
        if (function := of_transformers(name)) is not None:
            timed[f"{name}, {PACKAGE}"] = partial(gradients, function, inputs)
    return timed


def forward_backward(op: Op, form: str, inputs: tuple[Tensor | None, ...]) -> object:
    with force(form):
        return gradients(lambda *tensors: op(type(inputs)(*tensors))[0], inputs)


def gradients(function: Callable[..., Tensor], inputs: tuple[Tensor | None, ...]) -> object:
    """Of what a function of the inputs makes, to all of them."""
    wanted = [tensor.detach().requires_grad_() for tensor in inputs if tensor is not None]
    y = function(*wanted)
    return torch.autograd.grad(y, wanted, torch.ones_like(y))


def of_transformers(name: str) -> Callable[..., Tensor] | None:
    """The same by transformers, where it is there and has it, of the same inputs; it scales the queries once more."""
    if not is_there(PACKAGE):
        return None
    if name == "delta by head":
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        by_head = unwrap(torch_chunk_gated_delta_rule)  # beneath what takes fla's kernels where that is installed
        return lambda q, k, v, beta, g: by_head(q, k, v, g.squeeze(-1), beta)[0]
    if name == "delta by channel":
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

        by_channel = unwrap(chunk_kimi_delta_attention)
        return lambda q, k, v, beta, g: by_channel(q, k, v, g, beta)[0]
    return None


def recurrences(report: BenchReport) -> None:
    """Times over SSD's compiled form."""
    sizes = QUICK if report.quick else FULL
    timings = report.sweep({length: forms(length, sizes) for length in sizes.lengths})
    names = list(timings[sizes.lengths[0]])
    measure = next(name for name in names if name.startswith(MEASURE))
    report.ratios("time", "tokens", timings, [(name, measure) for name in names if name != measure], {})
    last = sizes.lengths[-1]
    for kind, goal in (("GLA", GLA_GOAL), ("delta by head", GOAL)):
        fastest = next(name for name in names if name.startswith(kind))
        report.at_most(f"{fastest} / {measure} at {last} tokens", goal, timings[last].ratio(fastest, measure))
    for other in (name for name in names if name.endswith(PACKAGE)):
        ours = next(name for name in names if name.startswith(other.partition(",")[0]))
        report.at_most(f"{ours} / {other} at {last} tokens", 1, timings[last].ratio(ours, other))
    report.notes += [
        f"batch 1, {sizes.heads} heads, keys of {sizes.key} and values of {sizes.value} channels, fp32",
        f"forward and backward, gradients of all inputs; {report.repetitions} rounds",
    ]
