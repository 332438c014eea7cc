"""Times causal attention with each of torch's kernels, and windowed attention as in the recipes, through our op."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hybridtron.device import compute_device
from hybridtron.ops.attention import AttentionInputs
from hybridtron.ops.attention import attention as attention_op
from hybridtron.proving.gpu.queue.machine import fastest
from hybridtron.proving.gpu.queue.rows import Recorder, Row, reason

BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
SHAPES = {"gdn_hybrid_412m": (8, 4096, 8, 128), "samba_421m": (8, 4096, 12, 128)}  # rows, tokens, heads, channels
WINDOW = 2048


def attention(record: Recorder) -> None:
    """Time both passes together, and for torch's kernels the forward pass alone too.

    FlexAttention would compile another kernel for the forward pass alone.
    """
    for recipe, shape in SHAPES.items():
        shape = (1, 64, 2, 32) if record.tiny else shape
        for name in BACKENDS:
            with record.case(f"{recipe}, full, {name}") as row:
                row |= full(name, made(shape, True))
        window = 16 if record.tiny else WINDOW
        with record.case(f"{recipe}, window {window}, the op") as row:
            row["both_ms"] = 1e3 * fastest(partial(both, windowed(window), made(shape, False)))


def full(backend: str, given: list[Tensor]) -> Row:
    """Time causal attention with one of torch's kernels; if it refuses the inputs, return the reason."""
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return passes(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), given)
    except RuntimeError as error:
        return {"available": False, "why": reason(error)}


def windowed(window: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a call of our op with a window, for rows without documents."""

    def call(q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor) -> Tensor:
        return attention_op(AttentionInputs(q_BLHK, k_BLGK, v_BLGK, window=window))

    return call


def made(shape: tuple[int, int, int, int], heads_first: bool) -> list[Tensor]:
    """Return random q, k and v."""
    rows, tokens, heads, channels = shape
    sizes = (rows, heads, tokens, channels) if heads_first else shape
    return [torch.randn(sizes, device=compute_device()).bfloat16().requires_grad_() for _ in range(3)]


def passes(call: Callable[..., Tensor], given: list[Tensor]) -> dict[str, float]:
    """Return the milliseconds of the forward pass, and of both passes."""
    with torch.no_grad():
        forward = fastest(lambda: call(*given))
    return {"forward_ms": 1e3 * forward, "both_ms": 1e3 * fastest(lambda: both(call, given))}


def both(call: Callable[..., Tensor], given: list[Tensor]) -> object:
    """Run forward and backward, and return the gradients."""
    y = call(*given)
    return torch.autograd.grad(y, given, torch.ones_like(y))
