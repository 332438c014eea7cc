"""Attention by the kernels of the flash-attn packages, versions 2, 3 and 4; run so far against emulations only.

Version 3 is for Hopper, version 4 for Hopper and Blackwell; they are packages of their own. On Hopper the order of the
three is that of the model's rates (`planning/rates.py`), as no GPU has measured them here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtron.determinism import is_deterministic
from hybridtron.device import compute_capability, optional_package
from hybridtron.ops.attention.reference import AttentionInputs
from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.documents import document_borders

PACKAGE = "flash_attn.flash_attn_interface"  # of flash-attn 2: other packages have a `flash_attn` without its functions


@dataclass(frozen=True)
class FlashVersion:
    """One of the packages."""

    package: str
    made_for: tuple[int, ...] | None = None  # first numbers of compute capabilities; None: all
    unlimited: int | None = -1  # how a side of the window without a limit is called
    longest: int = 256  # channels of a head
    longest_repeatable: int = 256  # of which gradients can be the same bits again
    step: int = 1  # which number channels of a head are a multiple of

    def missing(self) -> str | None:
        """Why it has no kernels for this device."""
        capability = compute_capability()
        if self.made_for is None or (capability is not None and capability[0] in self.made_for):
            return None
        return f"for compute capability {' and '.join(f'{first}.x' for first in self.made_for)}"

    def unsupported_reason(self, inputs: AttentionInputs) -> str | None:
        dtype, channels = inputs.q_BLHK.dtype, inputs.q_BLHK.shape[-1]
        if dtype not in (torch.float16, torch.bfloat16):
            return f"takes fp16 and bf16, not {dtype}"
        if channels > self.longest or channels % self.step:
            return f"takes heads of at most {self.longest} channels, a multiple of {self.step}, not {channels}"
        if is_deterministic() and channels > self.longest_repeatable:
            return f"adds up gradients of heads of {channels} channels in no fixed order"
        # It could skip no padding in front of the keys, which a memory has wherever rows remember unequally much.
        return None if inputs.memory is None else "takes no remembered keys"

    def attention(self, inputs: AttentionInputs) -> Tensor:
        """Rows as one batch, or all documents side by side."""
        q_BLHK, k_BLGK, v_BLGK, window, documents_BL, _, borders_E = inputs
        flash = optional_package(self.package).module
        assert flash is not None
        sides = (self.unlimited, self.unlimited) if window is None else (window - 1, 0)
        if documents_BL is None:
            return _output(
                flash.flash_attn_func(
                    q_BLHK, k_BLGK, v_BLGK, causal=True, window_size=sides, deterministic=is_deterministic()
                )
            )
        if borders_E is None:
            borders_E = document_borders(documents_BL)
        length = documents_BL.shape[1]
        y = flash.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q_BLHK, k_BLGK, v_BLGK)),
            cu_seqlens_q=borders_E,
            cu_seqlens_k=borders_E,
            max_seqlen_q=length,
            max_seqlen_k=length,
            causal=True,
            window_size=sides,
            deterministic=is_deterministic(),
        )
        return _output(y).view_as(q_BLHK)


def _output(given: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """Version 4 gives the logarithms of the sums beside it."""
    return given[0] if isinstance(given, tuple) else given


def _implementation(name: str, version: FlashVersion) -> Implementation[AttentionInputs, Tensor]:
    return Implementation(
        name, version.attention, "cuda", version.package, version.unsupported_reason, missing=version.missing
    )


FLASH_ATTN = _implementation("flash-attn", FlashVersion(PACKAGE))
FLASH_ATTN_3 = _implementation(
    "flash-attn-3", FlashVersion("flash_attn_interface", made_for=(9,), longest_repeatable=192, step=8)
)
FLASH_ATTN_4 = _implementation(
    "flash-attn-4", FlashVersion("flash_attn.cute.interface", made_for=(9, 10), unlimited=None, longest=128, step=8)
)
FASTEST_FIRST = (FLASH_ATTN_3, FLASH_ATTN_4, FLASH_ATTN)  # by the model's rates, not measured
