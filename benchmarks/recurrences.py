"""The recurrences whose state is a matrix, side by side: SSD, retention, gated linear attention, the delta rule.

All have the same number of heads, keys and values of the same size, and queries and keys of their own for each head, so
that they read, write and carry tensors of the same size. SSD's compiled form is the yardstick. Retention (RetNet) is
SSD's recurrence with a constant decay. By multiply-adds the delta rule does almost twice as much as SSD: its keys read
the state as its queries do, a triangular system is solved for every chunk, and its gradients go through both again.
RWKV-6 is gated linear attention read before a token's step. Mamba-3 is SSD's recurrence with its mixer's other
operations between the projections: steps, angles, rotated keys and queries, a skip.

Other packages' forms in torch are measured too, if they are installed: transformers' chunks of Gated DeltaNet and KDA,
and flash-linear-attention's plain forms, which are all it has for a CPU, as its kernels need a GPU. Forms that loop
over tokens are measured only at lengths up to LOOPED.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.mamba3 import Mamba3Spec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.mamba3 import Mamba3, Turns, trapezoid
from hybridtron.mixers.rwkv6 import read_before_step
from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.dispatch import Op, force
from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.rotations import AngleInputs, angles
from hybridtron.ops.ssd import DecayInputs, SSDInputs, decay_scan, ssd_scan
from hybridtron.parallel.linear import SINGLE_RANK
from hybridtron.proving.measuring import BenchReport
from hybridtron.requirements import installed, is_there

MEASURE = "SSD"
GOALS = {"retention": 2.0, "GLA": 2.0, "RWKV-6": 2.5, "delta by head": 4.0, "delta by channel": 4.0, "Mamba-3": 1.5}
"""Largest allowed time at the longest row, as a multiple of SSD's."""
FLA = "flash-linear-attention"
PLAIN = {  # fla's form for each of ours: its place, and whether it loops over tokens
    "retention": ("simple_gla.naive:naive_chunk_simple_gla", False),
    "GLA": ("gla.naive:naive_recurrent_gla", True),
    "RWKV-6": ("rwkv6.recurrent_naive:naive_recurrent_rwkv6", True),
    "delta by head": ("gated_delta_rule.naive:naive_chunk_gated_delta_rule", False),
    "delta by channel": ("kda.naive:naive_chunk_kda", False),
}
LOOPED = 1024  # tokens


@dataclass(frozen=True)
class Sizes:
    """H heads with K key and V value channels, and the row lengths."""

    heads: int
    key: int
    value: int
    lengths: tuple[int, ...]


FULL = Sizes(8, 64, 64, (256, 1024, 4096))
QUICK = Sizes(2, 8, 8, (64, 128))


def forms(length: int, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Return the timed forms: forward and backward over one row, with gradients for all inputs."""
    generator = torch.Generator().manual_seed(length)
    tokens = (1, length, sizes.heads)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator)

    def decay(channels: int) -> Tensor:
        return -0.1 * normal((*tokens, channels)).exp()

    q = normal((*tokens, sizes.key))
    k = normalize(normal((*tokens, sizes.key)), dim=-1)
    v = normal((*tokens, sizes.value))
    A = -torch.ones(sizes.heads)
    D = torch.zeros(sizes.heads)
    bias = torch.zeros(sizes.heads)
    beta = normal(tokens).sigmoid()
    ops = {
        MEASURE: (ssd_scan, SSDInputs(v, normal(tokens) - 2, A, k, q, D, bias)),
        "retention": (decay_scan, DecayInputs(q, k, v, torch.full(tokens, -0.05))),
        "GLA": (gla_scan, GLAInputs(q, k, v, decay(sizes.key))),
        "delta by head": (delta_scan, DeltaInputs(q, k, v, beta, decay(1))),
        "delta by channel": (delta_scan, DeltaInputs(q, k, v, beta, decay(sizes.key))),
    }
    timed: dict[str, Callable[[], object]] = {}
    for name, (op, inputs) in ops.items():
        for form in (known.name for known in op.implementations if known.unavailable_reason("cpu") is None):
            timed[f"{name}, {form}"] = partial(forward_backward, op, form, inputs)
    more: dict[str, tuple[Tensor | None, ...]] = {name: inputs for name, (_, inputs) in ops.items()}
    more["RWKV-6"] = (*more["GLA"], normal((sizes.heads, sizes.key)))
    timed["RWKV-6"] = partial(gradients, of_rwkv6, more["RWKV-6"])
    timed["Mamba-3"] = partial(gradients, *mamba3(sizes, v, q, k, normal=normal))
    for name, inputs in more.items():
        for package, function in others(name, length).items():
            timed[f"{name}, {package}"] = partial(gradients, function, inputs)
    return timed


def of_rwkv6(q: Tensor, k: Tensor, v: Tensor, g: Tensor, bonus: Tensor) -> Tensor:
    return read_before_step(GLAInputs(q, k, v, g), bonus)[0]


def mamba3(
    sizes: Sizes, x: Tensor, C: Tensor, B: Tensor, *, normal: Callable[..., Tensor]
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return Mamba-3's mixer between its projections as a function, and its inputs.

    Heads share keys and queries but for biases, as published.
    """
    spec = Mamba3Spec(state=sizes.key, head_dim=sizes.value, expand=1)
    mixer = Mamba3(spec, ModelSizes(sizes.heads * sizes.value, 1), SINGLE_RANK)
    for weight in mixer.parameters():
        torch.nn.init.ones_(weight)

    def function(x: Tensor, C: Tensor, B: Tensor, dt: Tensor, a: Tensor, trap: Tensor, rates: Tensor) -> Tensor:
        steps = trapezoid(dt, a, trap)
        turns = Turns(angles(AngleInputs(steps.delta_BLH, rates)))
        return mixer.scan(x, B, C, steps, turns, {}, SeqInfo.stream(x.shape[0], x.shape[1]))[0]

    tokens = x.shape[:3]
    numbers = normal(tokens) - 2, *normal((2, *tokens)), normal((*tokens[:2], spec.angles)).tanh()
    return function, (x, C[:, :, :1], B[:, :, :1], *numbers)


def forward_backward(op: Op, form: str, inputs: tuple[Tensor | None, ...]) -> object:
    with force(form):
        return gradients(lambda *tensors: op(type(inputs)(*tensors))[0], inputs)


def gradients(function: Callable[..., Tensor], inputs: tuple[Tensor | None, ...]) -> object:
    """Run a function on the inputs, and return its output's gradients with respect to all of them."""
    wanted = [tensor.detach().requires_grad_() for tensor in inputs if tensor is not None]
    y = function(*wanted)
    return torch.autograd.grad(y, wanted, torch.ones_like(y))


def others(name: str, length: int) -> dict[str, Callable[..., Tensor]]:
    """Return other packages' forms of a recurrence, by package, on the same inputs.

    Only installed packages that have the recurrence are included. They also scale the queries.
    """
    functions = {}
    if is_there("transformers") and (function := of_transformers(name)) is not None:
        functions["transformers"] = function
    if is_there("fla") and name in PLAIN and (length <= LOOPED or not PLAIN[name][1]):
        functions[FLA] = of_fla(name)
    return functions


def of_transformers(name: str) -> Callable[..., Tensor] | None:
    if name == "delta by head":
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        by_head = unwrap(torch_chunk_gated_delta_rule)  # without the decorator that prefers fla's kernels
        return lambda q, k, v, beta, g: by_head(q, k, v, g.squeeze(-1), beta)[0]
    if name == "delta by channel":
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

        by_channel = unwrap(chunk_kimi_delta_attention)
        return lambda q, k, v, beta, g: by_channel(q, k, v, g, beta)[0]
    return None


def of_fla(name: str) -> Callable[..., Tensor]:
    file, _, function = PLAIN[name][0].partition(":")
    plain: Any = getattr(import_module(f"fla.ops.{file}"), function)
    if name == "RWKV-6":  # takes heads before tokens
        return lambda q, k, v, g, bonus: plain(*(t.transpose(1, 2) for t in (q, k, v, g)), bonus)[0].transpose(1, 2)
    if name == "delta by head":
        return lambda q, k, v, beta, g: plain(q, k, v, g.squeeze(-1), beta)[0]
    if name == "delta by channel":
        return lambda q, k, v, beta, g: plain(q, k, v, g, beta)[0]
    return lambda q, k, v, g: plain(q, k, v, g)[0]


def recurrences(report: BenchReport) -> None:
    """Measure all recurrences over SSD's compiled form."""
    sizes = report.pick(full=FULL, quick=QUICK)
    timings = report.sweep({length: forms(length, sizes) for length in sizes.lengths})
    names = list(timings[sizes.lengths[0]])
    measure = next(name for name in names if name.startswith(MEASURE))
    report.ratios("time", "tokens", timings, [(name, measure) for name in names if name != measure], {})
    last = sizes.lengths[-1]
    for kind, goal in GOALS.items():
        fastest = next(name for name in names if name.startswith(kind))
        report.at_most(f"{fastest} / {measure} at {last} tokens", goal, timings[last].ratio(fastest, measure))
    for other in (name for name in names if name.endswith(("transformers", FLA))):
        ours = next(name for name in names if name.startswith(other.partition(",")[0]))
        longest = max(length for length, timed in timings.items() if other in timed)
        report.at_most(f"{ours} / {other} at {longest} tokens", 1, timings[longest].ratio(ours, other))
    report.notes += [
        f"batch 1, {sizes.heads} heads, keys of {sizes.key} and values of {sizes.value} channels, fp32",
        f"forward and backward, gradients of all inputs; {report.repetitions} rounds",
        f"{FLA} {installed(FLA) or 'not installed'}: its plain forms in torch, of GLA and RWKV-6 a loop over tokens; "
        "it has none of Mamba-3, and its kernels need a GPU",
    ]
