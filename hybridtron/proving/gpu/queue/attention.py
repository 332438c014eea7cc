"""Times causal attention at two recipes' shapes: full attention with torch's kernels, windowed attention with our op.

Both kinds of attention are timed at each shape. In training, gdn_hybrid_412m uses full attention, and samba_421m uses a
window of 2048 tokens.
"""

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
# recipe -> (sequences, tokens, heads, channels per head)
# In variable names, the suffixes for these axes are B, L, H (or G for keys and values) and K.
SHAPES = {"gdn_hybrid_412m": (8, 4096, 8, 128), "samba_421m": (8, 4096, 12, 128)}
WINDOW = 2048


def attention(record: Recorder) -> None:
    """Time the forward and backward pass together. For torch's kernels, also time the forward pass alone.

    Our op runs windowed attention by FlexAttention, which would have to be compiled again for the forward pass alone.
    """
    for recipe, shape in SHAPES.items():
        shape = (1, 64, 2, 32) if record.tiny else shape
        for name in BACKENDS:
            with record.case(f"{recipe}, full, {name}") as row:
                row |= full(name, made(shape, True))
        window = 16 if record.tiny else WINDOW
        with record.case(f"{recipe}, window {window}, the op") as row:
            row["both_ms"] = 1e3 * fastest(partial(both, windowed(window), made(shape, False)))


def full(backend: str, inputs: list[Tensor]) -> Row:
    """Return a row with the times of full causal attention by one of torch's kernels.

    If the kernel can't run, the row has the reason.
    """
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return passes(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), inputs)
    except RuntimeError as error:
        return {"available": False, "why": reason(error)}


def windowed(window: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function that calls our op with a sliding window, on sequences without document boundaries."""

    def call(q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor) -> Tensor:
        return attention_op(AttentionInputs(q_BLHK, k_BLGK, v_BLGK, window=window))

    return call


def made(shape: tuple[int, int, int, int], heads_first: bool) -> list[Tensor]:
    """Return random q, k and v in bf16, which require gradients.

    shape: sequences, tokens, heads, channels per head
    heads_first: put the heads' axis before the tokens' axis, as torch expects
    """
    rows, tokens, heads, channels = shape
    sizes = (rows, heads, tokens, channels) if heads_first else shape
    return [torch.randn(sizes, device=compute_device()).bfloat16().requires_grad_() for _ in range(3)]


def passes(call: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, float]:
    """Return the milliseconds for the forward pass alone, and for forward and backward together."""
    with torch.no_grad():
        forward = fastest(lambda: call(*inputs))
    return {"forward_ms": 1e3 * forward, "both_ms": 1e3 * fastest(lambda: both(call, inputs))}


def both(call: Callable[..., Tensor], inputs: list[Tensor]) -> object:
    """Run the forward and backward pass, and return the gradients dq, dk and dv."""
    y = call(*inputs)
    return torch.autograd.grad(y, inputs, torch.ones_like(y))
