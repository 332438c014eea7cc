"""Attention by the kernels of the flash_attn package; unmeasured, and run so far only against an emulation of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.device import is_deterministic, optional_package
from hybridtron.ops.attention.reference import AttentionInputs
from hybridtron.ops.dispatch import Implementation

PACKAGE = "flash_attn.flash_attn_interface"  # of flash-attn 2: other packages have a `flash_attn` without its functions


def _unsupported_reason(inputs: AttentionInputs) -> str | None:
    if inputs.q_BLHK.dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, not {inputs.q_BLHK.dtype}"
    if inputs.q_BLHK.shape[-1] > 256:
        return f"takes heads of at most 256 channels, not {inputs.q_BLHK.shape[-1]}"
    # It could skip no padding in front of the keys, which a memory has wherever rows remember unequally much.
    return None if inputs.memory is None else "takes no remembered keys"


def attention(inputs: AttentionInputs) -> Tensor:
    """Rows as one batch, or all documents side by side."""
    q_BLHK, k_BLGK, v_BLGK, window, documents_BL, _ = inputs
    flash = optional_package(PACKAGE).module
    assert flash is not None
    sides = (-1, -1) if window is None else (window - 1, 0)
    if documents_BL is None:
        return flash.flash_attn_func(
            q_BLHK, k_BLGK, v_BLGK, causal=True, window_size=sides, deterministic=is_deterministic()
        )
    batch, length = documents_BL.shape
    starts_BL = F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=True)
    # How many documents there are is known only on the device: this waits for it.
    borders = F.pad(starts_BL.flatten().nonzero().flatten(), (0, 1), value=batch * length).int()
    y = flash.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q_BLHK, k_BLGK, v_BLGK)),
        cu_seqlens_q=borders,
        cu_seqlens_k=borders,
        max_seqlen_q=length,
        max_seqlen_k=length,
        causal=True,
        window_size=sides,
        deterministic=is_deterministic(),
    )
    return y.view_as(q_BLHK)


FLASH_ATTN = Implementation("flash-attn", attention, "cuda", PACKAGE, _unsupported_reason)
