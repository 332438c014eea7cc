"""Generate each token with a single call of compiled code (`ops/native/steps.cpp`), for small models on a CPU.

In a small model, calling a torch operation takes as long as computing it. So one call to compiled C++ code runs the
full model, and computes a token for every row (sequence). C structs describe the model by the addresses of its weights
and states.

Supported models contain only Mamba, windowed attention and gated MLPs (`unsupported_reason`); `reader.py` runs all
other models with torch. The states after the prompt are copied once and then updated in place. The keys and values in
windows are stored in ring buffers, so that a new token moves no keys in memory.

Legend: B rows, M remembered tokens, E inner channels, N state entries, W window or taps, G key/value heads, K channels
per head, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hybridtron.architecture.rope import RopeOptions
from hybridtron.mixers.attention import Attention
from hybridtron.mixers.base import Mixer, State
from hybridtron.mixers.mamba import Mamba
from hybridtron.mixers.norm import PlainRMSNorm, RMSNorm
from hybridtron.mixers.swiglu import SwiGLU
from hybridtron.model.lm import LanguageModel
from hybridtron.model.stack import Residual, States
from hybridtron.ops.dispatch import anything_forced
from hybridtron.ops.native.library import call, missing
from hybridtron.ops.native.tensors import LOG2E, scalar
from hybridtron.ops.rope import frequencies
from hybridtron.parallel.adapters import Adapter
from hybridtron.parallel.linear import SINGLE_RANK

MOST_BYTES = 2**26  # size limit of the weights; for larger models torch's multithreaded matmuls are faster
VECTOR = 16  # the largest number of elements in a SIMD register; all sizes must be multiples of this number
SCAN, WINDOW, GATED = range(3)  # kinds of sub-layers: Mamba, windowed attention, gated MLP

NextLogits = Callable[[Tensor], Tensor]
"""Function from each row's last token (B,) to the logits for its next token (B, V)."""


class SubLayerTask(ctypes.Structure):
    """The C++ struct `SubLayer` in steps.cpp: a sub-layer's sizes, and the addresses of its weights and states.

    Fields that the sub-layer's kind does not use are 0. In order:

        kind           SCAN, WINDOW or GATED
        inner          inner channels (SCAN, GATED)
        states         state entries per channel (SCAN)
        taps           convolution taps (SCAN)
        rank           rank of the projection to step sizes (SCAN)
        heads          query heads (WINDOW)
        groups         key/value heads (WINDOW)
        size           channels per head (WINDOW)
        window         tokens that a token sees (WINDOW)
        rotary         rotated channels per head (WINDOW)
        stretch        factor for cos and sin (WINDOW)
        inner_eps      epsilon in the norms of dt, B and C (SCAN)
        norm           weight of the sub-layer's norm
        in_            the first projection's weight
        of_x           weight x_proj (SCAN) or kv (WINDOW)
        of_dt          weight dt_proj (SCAN)
        out            the last projection's weight
        taps_WE        the convolution's weight (SCAN)
        conv_bias      the convolution's bias (SCAN)
        bias           dt_bias (SCAN)
        A              -exp(A_log) log2(e) (SCAN)
        D              the skip connection's weight (SCAN)
        dt_norm        weight of dt's norm, 0 without norms of dt, B and C (SCAN)
        B_norm         weight of B's norm (SCAN)
        C_norm         weight of C's norm (SCAN)
        h              recurrent state (SCAN)
        tail           the convolution's last inputs (SCAN)
        keys           ring buffer with keys (WINDOW)
        values         ring buffer with values (WINDOW)
        frequencies    frequencies for rotary positions (WINDOW)
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "inner", "states", "taps", "rank", "heads", "groups", "size")),
        *((name, ctypes.c_int64) for name in ("window", "rotary")),
        ("stretch", ctypes.c_double),
        ("inner_eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("norm", "in_", "of_x", "of_dt", "out", "taps_WE", "conv_bias", "bias")),
        *((name, ctypes.c_void_p) for name in ("A", "D", "dt_norm", "B_norm", "C_norm")),
        *((name, ctypes.c_void_p) for name in ("h", "tail", "keys", "values", "frequencies")),
    )


class StepsTask(ctypes.Structure):
    """The C++ struct `Steps` in steps.cpp: the model's sizes, and the addresses of its weights, inputs and output.

    rows          rows in the batch
    width         width of the residual stream
    vocabulary    logits per row
    count         how many sub-layers there are
    eps           epsilon in the norms
    layers        sub-layers in order
    tokens        input: each row's last token
    seen          how many tokens each row has before its last token
    embedding     the embedding's weight
    norm          the final norm's weight
    head          the head's weight
    logits        output: logits for each row's next token
    scratch       temporary memory
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "width", "vocabulary", "count")),
        ("eps", ctypes.c_double),
        ("layers", ctypes.POINTER(SubLayerTask)),
        *((name, ctypes.c_void_p) for name in ("tokens", "seen", "embedding", "norm", "head", "logits", "scratch")),
    )


def unsupported_reason(model: LanguageModel) -> str | None:
    """Return the reason why the compiled code can't run a model, or None if it can."""
    weights = list(model.parameters())
    kinds = {(weight.device.type, weight.dtype) for weight in weights}
    if kinds not in ({("cpu", torch.float32)}, {("cpu", torch.float64)}):
        return f"the compiled code supports only fp32 and float64 on a CPU, not {kinds}"
    if sum(weight.numel() * weight.element_size() for weight in weights) > MOST_BYTES:
        return f"the compiled code supports only models of at most {MOST_BYTES >> 20} MiB"
    if anything_forced() or model.slice.tensor != SINGLE_RANK or not (model.slice.first and model.slice.last):
        return "the compiled code supports only full models, without forced implementations of ops"
    if any(isinstance(module, Adapter) for module in model.modules()):
        return "the compiled code supports no adapters"
    if not all(isinstance(layer, Residual) for layer in model.layers.values()):
        return "the compiled code supports neither shared attention nor parallel branches"
    layers = residuals(model).values()
    if {model.embedding_multiplier, model.logits_scaling, *(layer.multiplier for layer in layers)} != {1.0}:
        return "the compiled code supports no multipliers"
    sizes = [len(model.norm.weight), *(1 if layer.norm_after else _inner(layer.mixer) for layer in layers)]
    if any(size % VECTOR for size in sizes):
        return f"the compiled code supports Mamba, windowed attention and gated MLPs with sizes that {VECTOR} divides"
    return missing()


def residuals(model: LanguageModel) -> dict[int, Residual]:
    """Return the sub-layers by index, without feeders and parallel branches."""
    return {int(name): layer for name, layer in model.layers.items() if isinstance(layer, Residual)}


def _inner(mixer: Mixer) -> int:
    """Return the size of a mixer's inner vectors.

    Returns VECTOR for attention. Returns 1, which is not divisible by VECTOR, for a mixer or an option that the
    compiled code does not support.
    """
    if isinstance(mixer, Mamba):
        if mixer.spec.sparse is None:
            return len(mixer.get_parameter("in_proj.weight")) // 2
        return 1
    if isinstance(mixer, SwiGLU):
        if mixer.multiplier == 1:
            return len(mixer.get_parameter("gate_up.weight")) // 2
        return 1
    if not isinstance(mixer, Attention) or not mixer.window:
        return 1
    heads = mixer.heads
    if heads.conv or heads.gate or heads.qk_norm != "none" or heads.scale is not None:
        return 1
    return VECTOR


class CompiledDecode:
    """Function that continues rows after a prompt, one token per call. It owns copies of states and positions.

    `positions_B` says how many tokens each row has read.
    """

    def __init__(self, model: LanguageModel, states: States, positions_B: Tensor) -> None:
        self._kept: list[Tensor] = []  # keeps the tensors alive whose addresses are in the structs
        self.dtype, rows, width = model.norm.weight.dtype, len(positions_B), len(model.norm.weight)
        self._seen_B = positions_B.clone()
        layers = [_task(self, layer, states[index]) for index, layer in residuals(model).items()]
        self._logits = torch.empty(rows, len(model.output_weight()), dtype=self.dtype)
        room = max((_room(layer, width) for layer in layers), default=0)
        self._task = StepsTask(
            rows=rows, width=width, vocabulary=self._logits.shape[1], count=len(layers), eps=model.norm.eps,
            layers=(SubLayerTask * len(layers))(*layers), seen=self._seen_B.data_ptr(),
            embedding=self.of(model, "embedding.weight"), norm=self.at(model.norm.weight),
            head=self.at(model.output_weight()), logits=self._logits.data_ptr(),
            scratch=self.at(torch.empty(rows * (2 * width + room) + VECTOR, dtype=self.dtype)),
        )  # fmt: skip

    def __call__(self, tokens_B: Tensor) -> Tensor:
        """Return the next token's logits (B, V), in a buffer that the next call overwrites."""
        self._task.tokens = tokens_B.data_ptr()
        call(f"steps_{scalar(self.dtype)}", self._task, 1)
        return self._logits

    def of(self, module: nn.Module, name: str) -> int:
        """Return a weight's address."""
        return self.at(module.get_parameter(name))

    def at(self, tensor: Tensor) -> int:
        """Return the address of a tensor's contiguous data, and keep the data alive as long as this object."""
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()


def _task(steps: CompiledDecode, layer: Residual, state: State) -> SubLayerTask:
    """Describe a sub-layer for the compiled code."""
    match layer.mixer:
        case Mamba() as mixer:
            task = _scan(steps, mixer, state)
        case Attention() as mixer:
            task = _window(steps, mixer, state)
        case SwiGLU() as mixer:
            task = _gated(steps, mixer)
        case other:
            raise AssertionError(type(other))
    task.norm = steps.at(layer.norm.weight)
    return task


def _scan(steps: CompiledDecode, mixer: Mamba, state: State) -> SubLayerTask:
    A_NE = (-torch.exp(mixer.A_log) * LOG2E).clamp(-1e30, 1e30).T
    inner, taps = mixer.conv_weight.shape
    task = SubLayerTask(
        kind=SCAN, inner=inner, states=mixer.state, taps=taps, rank=mixer.rank, in_=steps.of(mixer, "in_proj.weight"),
        of_x=steps.of(mixer, "x_proj.weight"), of_dt=steps.of(mixer, "dt_proj.weight"),
        out=steps.of(mixer, "out_proj.weight"), taps_WE=steps.at(mixer.conv_weight.T),
        conv_bias=steps.at(mixer.conv_bias), bias=steps.at(mixer.dt_bias), A=steps.at(A_NE), D=steps.at(mixer.D),
        h=steps.at(state["ssm"].mT.clone(memory_format=torch.contiguous_format)),
        tail=steps.at(state["conv"].clone()),
    )  # fmt: skip
    if mixer.spec.inner_norm != "none":
        task.inner_eps = mixer.spec.norm_eps
        task.dt_norm = steps.at(_scale(mixer.dt_norm, mixer.rank, A_NE.dtype))
        task.B_norm = steps.at(_scale(mixer.B_norm, mixer.state, A_NE.dtype))
        task.C_norm = steps.at(_scale(mixer.C_norm, mixer.state, A_NE.dtype))
    return task


def _scale(norm: RMSNorm | PlainRMSNorm, size: int, dtype: torch.dtype) -> Tensor:
    """Return a norm's weight, which is 1 without a learned scale."""
    if isinstance(norm, RMSNorm):
        return norm.weight
    return torch.ones(size, dtype=dtype)


def _window(steps: CompiledDecode, mixer: Attention, state: State) -> SubLayerTask:
    heads = mixer.heads
    rope = heads.positions or RopeOptions()
    rotary = 0 if heads.positions is None else mixer.rotary_dim
    return SubLayerTask(
        kind=WINDOW, heads=heads.heads, groups=heads.groups(), size=mixer.head_dim, window=mixer.window, rotary=rotary,
        in_=steps.of(mixer, "q.weight"), of_x=steps.of(mixer, "kv.weight"), out=steps.of(mixer, "out.weight"),
        keys=steps.at(as_ring(state["keys"], steps._seen_B)), values=steps.at(as_ring(state["values"], steps._seen_B)),
        frequencies=steps.at(frequencies(rope, rotary)), stretch=rope.attention_factor,
    )  # fmt: skip


def as_ring(past_BMGK: Tensor, seen_B: Tensor) -> Tensor:
    """Return past keys or values as a ring buffer (B, W, G, K): each token at its position modulo the window W.

    The window includes the next token, so W is M + 1. `seen_B` says how many tokens each row has so far.
    """
    window = past_BMGK.shape[1] + 1
    slots_W = torch.arange(window)
    back_BW = (seen_B[:, None] - 1 - slots_W) % window  # age of each slot's token, 0 for the last token
    ordered_BW = (window - 2 - back_BW).clamp(min=0)  # the slot of the next token may hold anything
    index = ordered_BW[..., None, None].expand(-1, -1, *past_BMGK.shape[2:])
    return past_BMGK.gather(1, index)


def _gated(steps: CompiledDecode, mixer: SwiGLU) -> SubLayerTask:
    return SubLayerTask(
        kind=GATED, inner=_inner(mixer), in_=steps.of(mixer, "gate_up.weight"), out=steps.of(mixer, "down.weight")
    )


def _room(task: SubLayerTask, width: int) -> int:
    """Return the scratch memory that a sub-layer needs per row, in elements."""
    heads = 2 * task.heads * task.size + 2 * task.groups * task.size + task.window + VECTOR
    return width + (heads if task.kind == WINDOW else 3 * task.inner + task.rank + 2 * task.states)
