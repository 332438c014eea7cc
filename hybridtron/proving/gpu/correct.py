"""Every op and mixer on the device, compared with its reference on the CPU in fp32: outputs, states, all gradients.

The calls of the ops are those that the mixers and the loss make: they are noted while these run on the CPU.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtron.architecture import SPECS
from hybridtron.architecture.adapters import AdaptedPart
from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.inits import Normal
from hybridtron.data.batch import SeqInfo
from hybridtron.device import compute_device
from hybridtron.mixers.base import Mixer, build_mixer
from hybridtron.model.init import starting_value
from hybridtron.ops.dispatch import Op, force, observed
from hybridtron.ops.dropout import DropoutInputs, channel_numbers, dropout, token_numbers
from hybridtron.ops.gated_norm import GatedScaleInputs, GatedSquaresInputs, gated_scale, gated_squares
from hybridtron.ops.loss import LinearCrossEntropyInputs, linear_cross_entropy
from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm
from hybridtron.ops.sparse import Budget, Seen, SparseInputs, sparse_attention
from hybridtron.parallel.adapters import Adapter, AdapterSizes
from hybridtron.parallel.linear import SINGLE_RANK, PlainLinear
from hybridtron.proving.measuring import BenchReport

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "mamba": [{}, {"sparse": {"pattern": "sink_window", "keys": 64}}],
    "mamba2": [
        {"head_dim": 32, "state": 32, "groups": 2},
        {"head_dim": 32, "state": 32, "norm": False, "multipliers": {"x": 0.5, "C": 2.0}},
    ],
    "mamba3": [{"head_dim": 32, "state": 32, "groups": 2, "norm": True}],
    "gla": [{"heads": 2}, {"heads": 4, "conv": 4}],
    "retnet": [{"heads": 2}],
    "gated_deltanet": [{"heads": 2}, {"heads": 4, "key_heads": 2, "expand_k": 0.5, "negative_eigenvalues": True}],
    "kda": [{"heads": 2}, {"heads": 4, "expand_k": 0.5, "negative_eigenvalues": True}],
    "rwkv6": [{"head_dim": 32}],
    "rwkv6_channel_mix": [{}],
    "attention": [
        {"heads": 8},
        {"heads": 8, "kv_heads": 2, "window": 96},
        {"heads": 8, "kv_heads": 2, "conv": 4},
        {"heads": 8, "kv_heads": 2, "qk_norm": "head", "gate": True},
    ],
    "span": [{"heads": 8, "kv_heads": 2, "chunk": 64, "block": 16, "blocks": 3, "relevance": "previous_chunk"}],
    "shared_attention": [{"heads": 8, "hidden": 512, "rank": 16, "adapt_attention": True}],
    "shared_span": [
        {"heads": 8, "hidden": 512, "rank": 16, "chunk": 64, "block": 16, "blocks": 3, "relevance": "previous_chunk"}
    ],
    "swiglu": [{"hidden": 512}, {"hidden": 512, "gate_multiplier": 0.5}],
    "squared_relu": [{"hidden": 512}],
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "adapter": {},
    "adapter dropout=0.2": {"dropout": 0.2},
    "adapter dora=True": {"dora": True},
}
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
FURTHER_OFF = {("kda heads=2", torch.bfloat16): 0.1}
"""Where more is allowed: of two numbers, A_log's, each gradient is a sum over all tokens (0.084 on an H200)."""
ROWS, VOCAB, NOISE = 2, 1000, Normal(0.02)


def correctness(report: BenchReport) -> None:
    """A line for every op and mixer, the worst of all its calls."""
    sizes, length = (ModelSizes(64, 4), 128) if report.quick else (ModelSizes(256, 4), 512)
    worst: dict[str, dict[torch.dtype, float]] = {}
    for what, dtype, error in _all(sizes, length, side_by_side=not report.quick):
        of_name = worst.setdefault(what, {})
        of_name[dtype] = max(error, of_name.get(dtype, 0.0))
    cells = [(name, *(f"{errors[dtype]:.1e}" for dtype in TOLERANCES)) for name, errors in worst.items()]
    report.table("against the references on the CPU", ("op or mixer", "fp32", "bf16"), cells)
    for dtype, limit in TOLERANCES.items():
        allowed = {name: FURTHER_OFF.get((name, dtype), limit) for name in worst}
        largest = max(errors[dtype] * limit / allowed[name] for name, errors in worst.items())
        report.at_most(f"largest error in {dtype}", limit, largest)


Found = tuple[str, torch.dtype, float]
"""How far outputs or gradients are from their references at most, as a share of the reference's norm."""


def _all(sizes: ModelSizes, length: int, side_by_side: bool) -> Iterator[Found]:
    """A process for each kind of mixer, if side by side: one alone compiles kernels for minutes."""
    assert set(OPTIONS) == set(SPECS), "a new mixer stands in OPTIONS too"
    parts = {kind: partial(_of_mixers, kind, sizes, length) for kind in OPTIONS}
    parts["the rest"] = partial(_of_the_rest, sizes, length)
    if not side_by_side:
        yield from chain.from_iterable(part() for part in parts.values())
        return
    processes = max(1, min(len(parts), (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        for waiting in [pool.submit(_survived, name, part) for name, part in parts.items()]:
            yield from waiting.result()


def _survived(name: str, part: Callable[[], list[Found]]) -> list[Found]:
    """Of a part that fails an infinite error: the others are still worth knowing."""
    torch.set_num_threads(1)
    try:
        return part()
    except Exception:
        traceback.print_exc()
        return [(f"{name} FAILED", dtype, math.inf) for dtype in TOLERANCES]


def _of_mixers(kind: str, sizes: ModelSizes, length: int) -> list[Found]:
    """All options of a kind of mixer, and the ops that they call."""
    device, found = compute_device(), list[Found]()
    for dtype in TOLERANCES:
        calls: list[Call] = []
        for options in OPTIONS[kind]:
            spec = SPECS[kind](**options)
            error = mixer_error(spec, sizes, length, dtype, device, calls)
            found.append((f"{kind} {spec.describe()}".strip(), dtype, error))
        found += _of_calls(calls, dtype, device)
    return found


def _of_the_rest(sizes: ModelSizes, length: int) -> list[Found]:
    """Adapters, and the ops that no mixer calls."""
    device, found = compute_device(), list[Found]()
    for dtype in TOLERANCES:
        for what, options in ADAPTERS.items():
            found.append((what, dtype, _adapter_error(options, sizes.width, length, dtype, device)))
        calls: list[Call] = []
        with noted(calls), force("reference"):
            x_LBD, added_LBD = torch.randn(2, length, ROWS, sizes.width, dtype=dtype).requires_grad_()
            weight_D = torch.ones(sizes.width, dtype=dtype, requires_grad=True)
            for stream_LBD in (x_LBD, x_LBD.float()):
                summed_LBD, _ = add_rms_norm(AddRMSNormInputs(stream_LBD, added_LBD, weight_D, 1e-5))
                rms_norm(RMSNormInputs(summed_LBD, weight_D, 1e-5))
            x_TD, weight_VD = (torch.randn(n, sizes.width, dtype=dtype).requires_grad_() for n in (length, VOCAB))
            labels_T, mask_T = torch.randint(VOCAB, (length,)), torch.ones(length, dtype=torch.bool)
            weight_VD = weight_VD / sizes.width**0.5
            linear_cross_entropy(LinearCrossEntropyInputs(x_TD, weight_VD, labels_T, mask_T, 1e-4))
            y_BLHP, z_BLHP = torch.randn(2, ROWS, length, 4, sizes.width // 4, dtype=dtype).requires_grad_()
            squares_BLH = gated_squares(GatedSquaresInputs(y_BLHP, z_BLHP))  # of a norm over ranks
            gated_scale(GatedScaleInputs(y_BLHP, z_BLHP, torch.rsqrt(squares_BLH + 1), weight_D.unflatten(0, (4, -1))))
            numbers = token_numbers(5, torch.arange(length).expand(ROWS, -1), 0).T, channel_numbers(5, 3, sizes.width)
            dropout(DropoutInputs(x_LBD, *numbers, 0.3))
            for budget in (Budget(bin=24, best=24), Budget(best=40)):
                sparse_attention(_by_content(budget, sizes, length, dtype))
        found += _of_calls(calls, dtype, device)
    return found


Call = tuple[Op, Any]


def _by_content(budget: Budget, sizes: ModelSizes, length: int, dtype: torch.dtype) -> SparseInputs:
    """Keys that are chosen by bins and scores, given here: a mixer's own would differ with the rounding of its type."""
    q, k, v = (torch.randn(ROWS, length, n, dtype=dtype).requires_grad_() for n in (16, 16, sizes.width))
    documents = (torch.arange(length) >= length // 3).long().expand(ROWS, -1)
    places = torch.where(documents > 0, torch.arange(length) - length // 3, torch.arange(length))
    of_queries, of_keys = torch.randint(4, (2, ROWS, length)) if budget.bin else (None, None)
    seen = Seen(budget, documents, places, of_queries, of_keys, torch.randn(ROWS, length))
    return SparseInputs(q, k, v, seen)


def _of_calls(calls: list[Call], dtype: torch.dtype, device: torch.device) -> list[Found]:
    return [(op.name, dtype, _op_error(op, inputs, device)) for op, inputs in calls]


def noted(calls: list[Call]) -> AbstractContextManager[None]:
    """The calls of ops inside the block are recorded, with their inputs."""
    return observed(lambda op, inputs: calls.append((op, tree_map_only(Tensor, _copied, inputs))))


def mixer_error(
    spec: MixerSpec, sizes: ModelSizes, length: int, dtype: torch.dtype, device: torch.device, calls: list[Call]
) -> float:
    """A mixer in a type on a device against the same weights and input, as rounded to it, in fp32 on the CPU.

    Its first row holds two documents.

    Into `calls` go those of its ops, as this type makes them. Gradients are those of outputs beside a document's first.
    Such a token reads itself alone: with q . k near 0 there is next to nothing for a norm to make as large as all else,
    and the smaller that is, the larger is its gradient. One was 30 times the others'.
    """
    border = length - length // 3
    documents_BL = torch.stack([(torch.arange(length) >= border).int(), torch.zeros(length, dtype=torch.int32)])
    positions_BL = torch.stack([torch.arange(length) % border, torch.arange(length)])
    seq = SeqInfo(positions_BL, documents_BL, key=0)

    def made(device: torch.device, kind: torch.dtype, form: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        mixer = filled_mixer(spec, sizes, device, dtype)
        if kind == torch.float32:
            mixer = mixer.float()
        x_LBD = torch.randn(length, ROWS, spec.input_width(sizes)).to(device, dtype).to(kind).requires_grad_()
        with force(form):
            y_LBD, state, _ = mixer(x_LBD, None, seq.map(lambda tensor: tensor.to(device)))
        weights = [x_LBD, *mixer.parameters()]
        later_LBD = y_LBD * (positions_BL.T.unsqueeze(2) > 0).to(device)
        # some weights of sparse attention learn by an auxiliary loss alone
        gradients = torch.autograd.grad(_some_sum([later_LBD]), weights, allow_unused=True, materialize_grads=True)
        return [y_LBD, *state.values(), *gradients]

    with noted(calls):
        made(torch.device("cpu"), dtype, "reference")
    return _apart(made(device, dtype, None), made(torch.device("cpu"), torch.float32, "reference"))


def _adapter_error(options: dict[str, Any], width: int, length: int, dtype: torch.dtype, device: torch.device) -> float:
    """As `mixer_error`, of a projection with two parts, and an adapter of one of them."""
    parts = [AdaptedPart("k", width, True), AdaptedPart("v", width // 2, False)]
    seq = replace(SeqInfo.stream(ROWS, length), key=7)

    def made(device: torch.device, kind: torch.dtype) -> list[Tensor]:
        layer = PlainLinear(width, sum(part.rows for part in parts))
        adapter = Adapter("layers.0.mixer.kv", AdapterSizes(width, 0, parts, rank=8, scale=2.0, **options))
        weights = [layer.weight, *adapter.parameters()]
        for index, weight in enumerate(weights):
            weight.data = starting_value(NOISE, tuple(weight.shape), 1, str(index)).to(dtype).to(device, kind)
        adapter.seq = seq.map(lambda tensor: tensor.to(device))
        x_LBD = starting_value(Normal(1.0), (length, ROWS, width), 1, "x").to(dtype).to(device, kind).requires_grad_()
        y_LBC = adapter(x_LBD, layer(x_LBD), layer.weight.detach())
        return [y_LBC, *torch.autograd.grad(_some_sum([y_LBC]), [x_LBD, *weights])]

    return _apart(made(device, dtype), made(torch.device("cpu"), torch.float32))


def filled_mixer(spec: MixerSpec, sizes: ModelSizes, device: torch.device, dtype: torch.dtype) -> Mixer:
    """A mixer with the weights that training would start from, but for zeros, which would hide what they multiply."""
    mixer, table = build_mixer(spec, sizes, SINGLE_RANK), spec.parameters(sizes)
    for name, weight in mixer.named_parameters():
        start = starting_value(table[name].init, tuple(weight.shape), 1, name)
        weight.data.copy_(start if start.any() else starting_value(NOISE, tuple(weight.shape), 1, name))
        weight.data = weight.data.to(device, torch.float32 if table[name].fp32 else dtype)
    return mixer


def _op_error(op: Op, inputs: Any, device: torch.device) -> float:
    def result(function: Callable[..., Any], prepared: Callable[[Tensor], Tensor]) -> list[Tensor]:
        own = tree_map_only(Tensor, lambda x: prepared(x).detach().clone().requires_grad_(x.requires_grad), inputs)
        outputs = [tensor for tensor in _tensors(function(own)) if tensor.is_floating_point()]
        if op.name == "angles":  # which are the same a full turn apart
            outputs = [part for angle in outputs for part in (angle.cos(), angle.sin())]
        wanted = [tensor for tensor in _tensors(own) if tensor.requires_grad]
        made = [tensor for tensor in outputs if tensor.requires_grad]
        if not wanted:
            return outputs
        gradients = torch.autograd.grad(_some_sum(made), wanted, allow_unused=True)
        return [*outputs, *(gradient for gradient in gradients if gradient is not None)]

    ours = result(op, lambda tensor: tensor.to(device))
    exact = result(op.reference.function, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    return _apart(ours, exact)


def _some_sum(tensors: list[Tensor]) -> Tensor:
    """A random linear function of tensors, the same on every device."""
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(tensor.shape, generator=random).to(tensor.device) for tensor in tensors]
    return torch.stack([(t.float() * w).sum() for t, w in zip(tensors, weights, strict=True)]).sum()


def _apart(ours: list[Tensor], exact: list[Tensor]) -> float:
    pairs = [
        (a.detach().float().cpu(), b.detach().float().cpu())
        for a, b in zip(ours, exact, strict=True)
        if b.is_floating_point()
    ]
    errors = [((a - b).norm() / b.norm().clamp_min(1e-6)).item() for a, b in pairs]
    return max(math.inf if math.isnan(error) else error for error in errors)


def _copied(tensor: Tensor) -> Tensor:
    """With its wish for a gradient: angles of RoPE have none."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
