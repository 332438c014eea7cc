"""Causal attention by the flash-attn packages, versions 2, 3 and 4; so far tested only against stand-in packages.

Version 3 has kernels for Hopper. Version 4 has kernels for Hopper and Blackwell. Each version is a separate package. If
several versions can run, the first of FASTEST_FIRST is used. The order follows assumed rates (`planning/rates.py`); it
was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtron.determinism import is_deterministic
from hybridtron.device import compute_capability, optional_package
from hybridtron.ops.attention.reference import AttentionInputs
from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.documents import document_boundaries

PACKAGE = "flash_attn.flash_attn_interface"  # version 2; the package `flash_attn` of version 4 lacks this module


@dataclass(frozen=True)
class FlashVersion:
    """A flash-attn package, and the limits of its kernels."""

    package: str
    made_for: tuple[int, ...] | None = None  # supported compute capabilities (major numbers); None: all
    unlimited: int | None = -1  # the entry of the argument `window_size` for a side without a limit
    longest: int = 256  # largest supported number of channels in a head
    longest_repeatable: int = 256  # gradients can be deterministic for heads of up to this number of channels
    step: int = 1  # the number of channels in a head must be a multiple of `step`

    def missing(self) -> str | None:
        """Return the reason why the package's kernels do not run on this device; return None if they do."""
        capability = compute_capability()
        if self.made_for is None or (capability is not None and capability[0] in self.made_for):
            return None
        return f"for compute capability {' and '.join(f'{first}.x' for first in self.made_for)}"

    def unsupported_reason(self, inputs: AttentionInputs) -> str | None:
        dtype = inputs.q_BLHK.dtype
        channels = inputs.q_BLHK.shape[-1]
        if dtype not in (torch.float16, torch.bfloat16):
            return f"takes fp16 and bf16, not {dtype}"
        if channels > self.longest or channels % self.step:
            return f"takes heads of at most {self.longest} channels, a multiple of {self.step}, not {channels}"
        if is_deterministic() and channels > self.longest_repeatable:
            return f"adds up gradients of heads of {channels} channels in no fixed order"
        # Remembered keys are padded if rows have different numbers of them, and the kernels can't skip the padding.
        if inputs.memory is None:
            return None
        return "takes no remembered keys"

    def attention(self, inputs: AttentionInputs) -> Tensor:
        """Call the package. Without documents, each row is a sequence; else each document is a sequence."""
        q_BLHK, k_BLGK, v_BLGK, window, documents_BL, _, boundaries_E = inputs
        flash = optional_package(self.package).module
        assert flash is not None
        if window is None:
            sides = (self.unlimited, self.unlimited)
        else:
            sides = (window - 1, 0)
        if documents_BL is None:
            return _output(
                flash.flash_attn_func(
                    q_BLHK, k_BLGK, v_BLGK, causal=True, window_size=sides, deterministic=is_deterministic()
                )
            )
        if boundaries_E is None:
            boundaries_E = document_boundaries(documents_BL)
        length = documents_BL.shape[1]
        y = flash.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q_BLHK, k_BLGK, v_BLGK)),
            cu_seqlens_q=boundaries_E,
            cu_seqlens_k=boundaries_E,
            max_seqlen_q=length,
            max_seqlen_k=length,
            causal=True,
            window_size=sides,
            deterministic=is_deterministic(),
        )
        return _output(y).view_as(q_BLHK)


def _output(given: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """Return the attention output; version 4 of the package returns a pair (output, log-sum-exp)."""
    if isinstance(given, tuple):
        return given[0]
    return given


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
FASTEST_FIRST = (FLASH_ATTN_3, FLASH_ATTN_4, FLASH_ATTN)  # the order that `planning/rates.py` assumes; not measured
