"""Compares every op and mixer on the device with its fp32 reference on the CPU: outputs, states and all gradients.

Each mixer is compared as a module. While a mixer runs on the CPU, the inputs of its op calls are recorded. Each op is
then compared on the recorded inputs. Ops that no mixer calls get random inputs.

Letters in names of tensors:

    L   tokens in a sequence
    B   sequences
    T   tokens in all sequences
    D   channels in the residual stream
    V   vocabulary
    H   heads
    P   channels per head
    C   output channels in an adapted projection
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
    "mamba": [{}, {"inner_norm": "learned"}, {"sparse": {"pattern": "sink_window", "keys": 64}}],
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
    "moe": [
        {"experts": 8, "top_k": 2, "hidden": 256, "shared": 128, "shared_gate": True},
        {"experts": 8, "top_k": 2, "hidden": 256, "activation": "squared_relu", "scores": "sigmoid", "balance": "bias"},
        {"experts": 8, "top_k": 2, "hidden": 256, "activation": "squared_relu", "latent": 64},
    ],
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "adapter": {},
    "adapter dropout=0.2": {"dropout": 0.2},
    "adapter dora=True": {"dora": True},
}
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 3e-2}  # dtype -> limit on the relative error
FURTHER_OFF = {("kda heads=2", torch.bfloat16): 0.1}
"""(mixer, dtype) -> larger tolerance.

With two heads, A_log has two elements. The gradient of each element is a sum over all tokens, in which rounding errors
add up: the relative error was 0.084 on an H200.
"""
ROWS = 2  # sequences in a batch
VOCAB = 1000
NOISE = Normal(0.02)


def correctness(report: BenchReport) -> None:
    """Add a table with a row for every op and mixer. A row has the largest error over all calls, in each dtype.

    For each dtype, also add the goal that all errors are within their tolerances.
    """
    if report.quick:
        sizes = ModelSizes(64, 4)
        length = 128
    else:
        sizes = ModelSizes(256, 4)
        length = 512
    worst: dict[str, dict[torch.dtype, float]] = {}
    for label, dtype, error in _all(sizes, length, side_by_side=not report.quick):
        by_dtype = worst.setdefault(label, {})
        by_dtype[dtype] = max(error, by_dtype.get(dtype, 0.0))
    cells = [(name, *(f"{errors[dtype]:.1e}" for dtype in TOLERANCES)) for name, errors in worst.items()]
    report.table("against the references on the CPU", ("op or mixer", "fp32", "bf16"), cells)
    for dtype, limit in TOLERANCES.items():
        allowed = {name: FURTHER_OFF.get((name, dtype), limit) for name in worst}
        largest = max(errors[dtype] * limit / allowed[name] for name, errors in worst.items())
        report.at_most(f"largest error in {dtype}", limit, largest)


Found = tuple[str, torch.dtype, float]
"""Result of a comparison, as a tuple:

- name of an op or mixer
- dtype
- largest relative error: the norm of a difference in outputs or gradients, divided by the norm of the reference
"""


def _all(sizes: ModelSizes, length: int, side_by_side: bool) -> Iterator[Found]:
    """Yield the results for all mixers, adapters and ops.

    With `side_by_side`, each kind of mixer runs in its own process. In a single process, compiling all kernels takes
    minutes.
    """
    assert set(OPTIONS) == set(SPECS), "OPTIONS and SPECS name different mixers: add each new mixer to OPTIONS"
    parts = {kind: partial(_of_mixers, kind, sizes, length) for kind in OPTIONS}
    parts["the rest"] = partial(_of_the_rest, sizes, length)
    if not side_by_side:
        yield from chain.from_iterable(part() for part in parts.values())
        return
    processes = max(1, min(len(parts), (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        for waiting in [pool.submit(_run_part, name, part) for name, part in parts.items()]:
            yield from waiting.result()


def _run_part(name: str, part: Callable[[], list[Found]]) -> list[Found]:
    """Return the results of `part`, which compares one kind of mixer, or the adapters and further ops.

    If the part fails, return an infinite error, so that the other parts still run.
    """
    torch.set_num_threads(1)
    try:
        return part()
    except Exception:
        traceback.print_exc()
        return [(f"{name} FAILED", dtype, math.inf) for dtype in TOLERANCES]


def _of_mixers(kind: str, sizes: ModelSizes, length: int) -> list[Found]:
    """Return the errors for one kind of mixer, with each set of options in OPTIONS, and for the ops that it calls."""
    device = compute_device()
    errors = list[Found]()
    for dtype in TOLERANCES:
        calls: list[Call] = []
        for options in OPTIONS[kind]:
            spec = SPECS[kind](**options)
            error = mixer_error(spec, sizes, length, dtype, device, calls)
            errors.append((f"{kind} {spec.describe()}".strip(), dtype, error))
        errors += _of_calls(calls, dtype, device)
    return errors


def _of_the_rest(sizes: ModelSizes, length: int) -> list[Found]:
    """Return the errors for adapters, and for ops that no mixer calls."""
    device = compute_device()
    errors = list[Found]()
    for dtype in TOLERANCES:
        for adapter, options in ADAPTERS.items():
            errors.append((adapter, dtype, _adapter_error(options, sizes.width, length, dtype, device)))
        calls: list[Call] = []
        with record_calls(calls), force("reference"):
            x_LBD, added_LBD = torch.randn(2, length, ROWS, sizes.width, dtype=dtype).requires_grad_()
            weight_D = torch.ones(sizes.width, dtype=dtype, requires_grad=True)
            for stream_LBD in (x_LBD, x_LBD.float()):
                summed_LBD, _ = add_rms_norm(AddRMSNormInputs(stream_LBD, added_LBD, weight_D, 1e-5))
                rms_norm(RMSNormInputs(summed_LBD, weight_D, 1e-5))
            x_TD, weight_VD = (torch.randn(n, sizes.width, dtype=dtype).requires_grad_() for n in (length, VOCAB))
            labels_T = torch.randint(VOCAB, (length,))
            mask_T = torch.ones(length, dtype=torch.bool)
            weight_VD = weight_VD / sizes.width**0.5
            linear_cross_entropy(LinearCrossEntropyInputs(x_TD, weight_VD, labels_T, mask_T, 1e-4))
            y_BLHP, z_BLHP = torch.randn(2, ROWS, length, 4, sizes.width // 4, dtype=dtype).requires_grad_()
            # a gated norm whose heads are divided among ranks calls the ops gated_squares and gated_scale
            squares_BLH = gated_squares(GatedSquaresInputs(y_BLHP, z_BLHP))
            gated_scale(GatedScaleInputs(y_BLHP, z_BLHP, torch.rsqrt(squares_BLH + 1), weight_D.unflatten(0, (4, -1))))
            numbers_LB = token_numbers(5, torch.arange(length).expand(ROWS, -1), 0).T
            dropout(DropoutInputs(x_LBD, numbers_LB, channel_numbers(5, 3, sizes.width), 0.3))
            for budget in (Budget(bin=24, best=24), Budget(best=40)):
                sparse_attention(_by_content(budget, sizes, length, dtype))
        errors += _of_calls(calls, dtype, device)
    return errors


Call = tuple[Op, Any]
"""An op and the inputs of a call."""


def _by_content(budget: Budget, sizes: ModelSizes, length: int, dtype: torch.dtype) -> SparseInputs:
    """Return random inputs for sparse attention, with the bins and scores that select keys.

    A mixer would compute bins and scores from its input, with rounding errors that could change the selected keys and
    thus the outputs.
    """
    q, k, v = (torch.randn(ROWS, length, n, dtype=dtype).requires_grad_() for n in (16, 16, sizes.width))
    documents = (torch.arange(length) >= length // 3).long().expand(ROWS, -1)
    positions = torch.where(documents > 0, torch.arange(length) - length // 3, torch.arange(length))
    if budget.bin:
        query_bins, key_bins = torch.randint(4, (2, ROWS, length))
    else:
        query_bins = None
        key_bins = None
    visible = Seen(budget, documents, positions, query_bins, key_bins, torch.randn(ROWS, length))
    return SparseInputs(q, k, v, visible)


def _of_calls(calls: list[Call], dtype: torch.dtype, device: torch.device) -> list[Found]:
    return [(op.name, dtype, _op_error(op, inputs, device)) for op, inputs in calls]


def record_calls(calls: list[Call]) -> AbstractContextManager[None]:
    """Return a context. Each op call inside the context is appended to `calls`, with copies of its inputs."""
    return observed(lambda op, inputs: calls.append((op, tree_map_only(Tensor, _copied, inputs))))


def mixer_error(
    spec: MixerSpec, sizes: ModelSizes, length: int, dtype: torch.dtype, device: torch.device, calls: list[Call]
) -> float:
    """Return a mixer's largest relative error on a device, compared with fp32 on the CPU.

    The run on the device is in `dtype`. Both runs start from the same inputs and weights, rounded to `dtype`. The
    batch's first sequence holds two documents. A third run is on the CPU in `dtype`: its op calls are appended to
    `calls`.

    The compared gradients are those of a weighted sum of the outputs. The sum excludes each document's first token,
    because this token reads only itself, so its output may be near 0. A norm then enlarges the output until it is as
    large as other outputs, and multiplies the gradient by the same factor. In one case, this gradient and its rounding
    error were 30 times as large as those of other tokens.
    """
    boundary = length - length // 3
    documents_BL = torch.stack([(torch.arange(length) >= boundary).int(), torch.zeros(length, dtype=torch.int32)])
    positions_BL = torch.stack([torch.arange(length) % boundary, torch.arange(length)])
    seq = SeqInfo(positions_BL, documents_BL, key=0)

    def made(device: torch.device, kind: torch.dtype, form: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        mixer = filled_mixer(spec, sizes, device, dtype)
        if kind == torch.float32:
            mixer = mixer.float()
        x_LBD = torch.randn(length, ROWS, spec.input_width(sizes)).to(device, dtype).to(kind).requires_grad_()
        with force(form):
            y_LBD, state, *_ = mixer(x_LBD, None, seq.map(lambda tensor: tensor.to(device)))
        weights = [x_LBD, *(weight for weight in mixer.parameters() if weight.requires_grad)]
        later_LBD = y_LBD * (positions_BL.T.unsqueeze(2) > 0).to(device)
        # some weights of sparse attention get gradients only from an auxiliary loss
        gradients = torch.autograd.grad(_some_sum([later_LBD]), weights, allow_unused=True, materialize_grads=True)
        return [y_LBD, *state.values(), *gradients]

    with record_calls(calls):
        made(torch.device("cpu"), dtype, "reference")
    return _apart(made(device, dtype, None), made(torch.device("cpu"), torch.float32, "reference"))


def _adapter_error(options: dict[str, Any], width: int, length: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return an adapter's largest relative error on a device, compared with fp32 on the CPU.

    The projection's output channels have two parts, k and v, and the adapter changes only k.
    """
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
    """Return a mixer with initial weights. A weight that is all zeros gets random values, so no gradient is zero."""
    mixer = build_mixer(spec, sizes, SINGLE_RANK)
    table = spec.parameters(sizes)
    for name, weight in mixer.named_parameters():
        start = starting_value(table[name].init, tuple(weight.shape), 1, name)
        weight.data.copy_(start if start.any() else starting_value(NOISE, tuple(weight.shape), 1, name))
        weight.data = weight.data.to(device, torch.float32 if table[name].fp32 else dtype)
    return mixer


def _op_error(op: Op, inputs: Any, device: torch.device) -> float:
    """Return an op's largest relative error on a device, compared with its fp32 reference on the CPU."""

    def result(function: Callable[..., Any], prepared: Callable[[Tensor], Tensor]) -> list[Tensor]:
        copies = tree_map_only(Tensor, lambda x: prepared(x).detach().clone().requires_grad_(x.requires_grad), inputs)
        tensors = list(_tensors(function(copies)))
        outputs = [tensor for tensor in tensors if tensor.is_floating_point()]
        chosen = [tensor.float() for tensor in tensors if not tensor.is_floating_point()]  # such as experts for tokens
        if op.name == "angles":  # angles may differ by full rotations, so their cosines and sines are compared
            outputs = [part for angle in outputs for part in (angle.cos(), angle.sin())]
        leaves = [tensor for tensor in _tensors(copies) if tensor.requires_grad]
        results = [tensor for tensor in outputs if tensor.requires_grad]
        if not leaves:
            return [*chosen, *outputs]
        gradients = torch.autograd.grad(_some_sum(results), leaves, allow_unused=True)
        return [*chosen, *outputs, *(gradient for gradient in gradients if gradient is not None)]

    ours = result(op, lambda tensor: tensor.to(device))
    exact = result(op.reference.function, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    return _apart(ours, exact)


def _some_sum(tensors: list[Tensor]) -> Tensor:
    """Return the sum of all elements, each multiplied by a random weight. The weights are equal on every device."""
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(tensor.shape, generator=random).to(tensor.device) for tensor in tensors]
    return torch.stack([(t.float() * w).sum() for t, w in zip(tensors, weights, strict=True)]).sum()


def _apart(ours: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest relative error in pairs of tensors: the difference's norm / the exact tensor's norm."""
    pairs = [
        (a.detach().float().cpu(), b.detach().float().cpu())
        for a, b in zip(ours, exact, strict=True)
        if b.is_floating_point()
    ]
    errors = [((a - b).norm() / b.norm().clamp_min(1e-6)).item() for a, b in pairs]
    return max(math.inf if math.isnan(error) else error for error in errors)


def _copied(tensor: Tensor) -> Tensor:
    """Return a detached copy that requires a gradient if the tensor does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
