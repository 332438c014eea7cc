"""The table of attention kernels for CUDA, the preferred kernel first, with each kernel's limits.

A call runs the first kernel that this machine has and that takes the call (`AttentionCase`). After the table come the
implementations for CPUs and for any device. No kernel here has dropout, a softcap or sinks, because the op has none.

The order follows measurements on a GPU, by this project or published; `hybridtron/proving/gpu/queue/attention.py` times
all rows side by side, so that one call on a GPU proves or changes the order.

Not in the table: cuDNN on Blackwell, because two models generated wrong text with it on a B200, for an unknown reason
(github.com/pytorch/pytorch issue 193893, open in August 2026), and cuDNN with deterministic gradients, which torch
refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtron.determinism import is_deterministic
from hybridtron.device import compute_capability
from hybridtron.ops.attention import flex, torch_kernels
from hybridtron.ops.attention.flash_attn import FLASH_2, FLASH_3, FLASH_4
from hybridtron.ops.attention.reference import AttentionInputs
from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.flex_tiles import SMALLEST_HEAD, TILE

HALVES = (torch.float16, torch.bfloat16)
ANY_HEAD = range(1, 1 << 30)
FLASH_2_CARDS = (8, 9, 10, 12)  # FlashAttention 2 raises an error on cards before Ampere


@dataclass(frozen=True)
class AttentionCase:
    """Properties of a call, by which a row is chosen.

    window: whether a window hides earlier keys of a row
    documents: whether rows have several documents
    memory: whether there are remembered keys
    deterministic: whether gradients must be summed in a fixed order
    """

    dtype: torch.dtype = torch.bfloat16
    channels: int = 128
    length: int = 4096
    window: bool = False
    documents: bool = False
    memory: bool = False
    deterministic: bool = False


def case_of(inputs: AttentionInputs) -> AttentionCase:
    """Return the case that a call belongs to."""
    length, _, channels = inputs.q_BLHK.shape[1:]
    window = inputs.window is not None and inputs.window < length
    documents = inputs.documents_BL is not None
    memory = inputs.memory is not None
    return AttentionCase(inputs.q_BLHK.dtype, channels, length, window, documents, memory, is_deterministic())


def _nothing() -> str | None:
    return None


@dataclass(frozen=True)
class AttentionRow:
    """One kernel, and the calls that it can compute.

    name          the implementation's name
    function      computes the op
    reason        the reason for the row's place
    package       the Python package with the kernel, or None
    missing       returns the reason why torch lacks the kernel, or None
    cards         first numbers of the compute capabilities; None: all
    dtypes        dtypes of the queries; None: all
    heads         numbers of channels in a head
    deterministic_up_to  largest head whose gradients can be deterministic
    window        takes a window
    documents     takes several documents in a row
    memory        takes remembered keys
    fewest        smallest number of tokens in a row that the kernel takes
    pays_from     smallest number of tokens in a row that is worth the kernel's preparation
    """

    name: str
    function: Callable[[AttentionInputs], Tensor]
    reason: str
    package: str | None = None
    missing: Callable[[], str | None] = _nothing
    cards: tuple[int, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = HALVES
    heads: range = ANY_HEAD
    deterministic_up_to: int = 256
    window: bool = True
    documents: bool = True
    memory: bool = False
    fewest: int = 1
    pays_from: int = 1

    def missing_reason(self) -> str | None:
        """Return the reason why this machine can't run the kernel, or None; the package is checked elsewhere."""
        capability = compute_capability()
        if self.cards is not None and (capability is None or capability[0] not in self.cards):
            return f"for compute capability {' and '.join(f'{card}.x' for card in self.cards)}"
        return self.missing()

    def refusal(self, case: AttentionCase) -> str | None:
        """Return the reason why the kernel can't compute a case, or None if it can."""
        if self.dtypes is not None and case.dtype not in self.dtypes:
            return f"takes {' and '.join(_short(dtype) for dtype in self.dtypes)}, not {_short(case.dtype)}"
        if case.channels not in self.heads:
            return f"takes {_shown(self.heads)}, not {case.channels}"
        if case.deterministic and case.channels > self.deterministic_up_to:
            return f"adds up gradients of heads of {case.channels} channels in no fixed order"
        for needed, supported, name in (
            (case.window, self.window, "no window"),
            (case.documents, self.documents, "no documents"),
            (case.memory, self.memory, "no remembered keys"),
        ):
            if needed and not supported:
                return f"takes {name}"
        if case.length < self.fewest:
            return f"takes rows of at least {self.fewest} tokens"
        return None

    def skipped_reason(self, case: AttentionCase) -> str | None:
        """Return the reason why another row should compute a case, or None."""
        if case.length < self.pays_from:
            return f"gains nothing on rows of fewer than {self.pays_from} tokens, as in generation"
        return self.refusal(case)

    @property
    def implementation(self) -> Implementation[AttentionInputs, Tensor]:
        return Implementation(
            self.name,
            self.function,
            "cuda",
            self.package,
            lambda inputs: self.skipped_reason(case_of(inputs)),
            missing=self.missing_reason,
            refusal=lambda inputs: self.refusal(case_of(inputs)),
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(heads: range) -> str:
    if heads.stop == ANY_HEAD.stop:
        return f"heads of at least {heads.start} channels"
    if heads.step == 1:
        return f"heads of at most {heads[-1]} channels"
    return f"heads of at most {heads[-1]} channels, a multiple of {heads.step}"


TABLE = (
    AttentionRow(
        "flash-attn-3",
        FLASH_3.attention,
        "1.5 to 1.75 times as fast as version 2 on Hopper (arXiv:2407.08608); not timed here",
        FLASH_3.package,
        cards=(9,),
        heads=range(8, 257, 8),
        deterministic_up_to=192,
    ),
    AttentionRow(
        "cudnn",
        torch_kernels.cudnn,
        "as fast as flash-attn-3 forward on an H100 (pytorch issue 142132); never run here",
        missing=torch_kernels.cudnn_missing,
        cards=(9,),
        heads=range(8, 129, 8),
        deterministic_up_to=0,
        window=False,
        documents=False,
        fewest=2,
    ),
    AttentionRow(
        "flash-attn-4",
        FLASH_4.attention,
        "71% of a B200's peak (planning/rates.py), no published times on Hopper; not timed here",
        FLASH_4.package,
        cards=(9, 10),
        heads=range(8, 129, 8),
    ),
    AttentionRow(
        "flash-attn", FLASH_2.attention, "windows and documents, without compilation; not timed here", FLASH_2.package,
        cards=FLASH_2_CARDS, heads=range(1, 257),
    ),
    AttentionRow(
        "sdpa",
        torch_kernels.sdpa,
        "FlashAttention 2 in torch, and its kernels for other dtypes",
        dtypes=None,
        deterministic_up_to=ANY_HEAD[-1],
        window=False,
        documents=False,
    ),
    AttentionRow(
        "flex",
        flex.attention,
        "windows and documents by skipped tiles; ran on an H200 (benchmarks/gpu.md)",
        dtypes=(torch.float32, *HALVES),
        heads=range(SMALLEST_HEAD, ANY_HEAD.stop),
        deterministic_up_to=ANY_HEAD[-1],
        memory=True,
        pays_from=TILE,
    ),
    AttentionRow(
        "varlen",
        torch_kernels.varlen,
        "FlashAttention 2 in torch with windows and documents; after flex until a GPU has run it",
        missing=torch_kernels.varlen_missing,
        cards=FLASH_2_CARDS,
        heads=range(8, 257, 8),
    ),
)  # fmt: skip
