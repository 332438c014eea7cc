"""Causal attention by the flash-attn packages, versions 2, 3 and 4; so far tested only against stand-in packages.

Version 3 has kernels for Hopper. Version 4 has kernels for Hopper and Blackwell. Each version is a separate package.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridtron.determinism import is_deterministic
from hybridtron.device import optional_package
from hybridtron.ops.attention.reference import AttentionInputs
from hybridtron.ops.documents import document_boundaries

PACKAGE = "flash_attn.flash_attn_interface"  # version 2; the package `flash_attn` of version 4 lacks this module


@dataclass(frozen=True)
class FlashVersion:
    """A flash-attn package; `table.py` has the limits of its kernels.

    unlimited: the entry in the argument `window_size` that puts no limit on its side
    """

    package: str
    unlimited: int | None = -1

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


def _output(returned: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """Return the attention output; version 4 of the package returns a pair (output, log-sum-exp)."""
    if isinstance(returned, tuple):
        return returned[0]
    return returned


FLASH_2 = FlashVersion(PACKAGE)
FLASH_3 = FlashVersion("flash_attn_interface")
FLASH_4 = FlashVersion("flash_attn.cute.interface", unlimited=None)
