"""Times every row of attention's table side by side on the shapes of training: `hybridtron/ops/attention/table.py`.

Each shape has a case for each row that this machine has and that takes the shape, and a case `order` with the rows from
fastest to slowest beside the row that the table chooses. If they differ, the table's order is wrong on this card.

Every row's output is compared with that of the row before it, since a fast kernel may also be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.attention import AttentionInputs
from hybridtron.ops.attention import attention as attention_op
from hybridtron.ops.attention.table import TABLE, AttentionRow, case_of
from hybridtron.ops.documents import document_boundaries
from hybridtron.ops.registry import attention_choice
from hybridtron.proving.gpu.queue.machine import fastest
from hybridtron.proving.gpu.queue.rows import Recorder, Row

ROUNDS = 5
CLOSE = 0.02  # of the largest output; bf16 keeps 8 bits


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one call.

    documents: mean number of documents in a row; 1: whole rows
    compiles: also time FlexAttention, which must first be compiled for these sizes
    """

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    channels: int
    window: int | None = None
    documents: int = 1
    compiles: bool = True


WINDOWS = {
    "samba_421m, window 2048": AttentionShape(8, 4096, 12, 12, 128, 2048),
    "samba_421m, window 2048, documents": AttentionShape(8, 4096, 12, 12, 128, 2048, 8),
    "grouped, 4k, documents": AttentionShape(4, 4096, 32, 8, 128, None, 8),
    "grouped, window 2048 of 8k, documents": AttentionShape(2, 8192, 32, 8, 128, 2048, 16),
}
FULL = {
    "gdn_hybrid_412m, 4k": AttentionShape(8, 4096, 8, 8, 128),
    "grouped, 4k": AttentionShape(4, 4096, 32, 8, 128, compiles=False),
    "grouped, 8k": AttentionShape(2, 8192, 32, 8, 128, compiles=False),
    "grouped, 32k": AttentionShape(1, 32768, 16, 4, 128, compiles=False),
    "heads of 64, 4k": AttentionShape(8, 4096, 16, 16, 64, compiles=False),
    "heads of 256, 4k": AttentionShape(4, 4096, 8, 2, 256, compiles=False),
}
SHAPES = {"windows and documents": WINDOWS, "full": FULL}
TINY = AttentionShape(2, 64, 4, 2, 32)


def attention(record: Recorder, kind: str) -> None:
    """Time forward and backward together, by row, on the shapes of one kind."""
    for label, shape in SHAPES[kind].items():
        inputs = made(shape, record.tiny)
        times: dict[str, float] = {}
        first: Tensor | None = None
        for row in TABLE:
            if row.name == "flex" and not shape.compiles:
                continue
            if not record.tiny and (reason := unable(row, inputs)) is not None:
                record.write(f"{label}: {row.name}", "measured", {"available": False, "why": reason})
                continue
            with record.case(f"{label}: {row.name}") as numbers:
                y = measured(row, inputs, record.tiny, numbers)
                times[row.name] = numbers["both_ms"]
                if first is None:
                    first = y
                numbers["apart"] = apart(y, first)
                assert numbers["apart"] < CLOSE, f"{row.name} differs from the first row by {numbers['apart']:.3g}"
        chosen, _ = attention_choice(case_of(inputs), inputs.q_BLHK.device.type)
        order = sorted(times, key=lambda name: times[name])
        with record.case(f"{label}: order") as numbers:
            numbers |= {"chosen": chosen, "fastest first": " ".join(order), "right": order[:1] == [chosen]}


def unable(row: AttentionRow, inputs: AttentionInputs) -> str | None:
    """Return the reason why this machine can't run the row on these inputs, or None."""
    return attention_op.named(row.name).unavailable_reason("cuda") or row.refusal(case_of(inputs))


def measured(row: AttentionRow, inputs: AttentionInputs, tiny: bool, numbers: Row) -> Tensor:
    """Put the milliseconds of the forward and backward pass into `numbers`, and return the output.

    On a CPU with tiny sizes the op's own choice runs in place of the row.
    """
    call: Callable[[AttentionInputs], Tensor] = attention_op if tiny else row.function
    leaves = inputs[:3]

    def both() -> object:
        y = call(inputs)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    numbers["both_ms"] = 1e3 * fastest(both, 1 if tiny else ROUNDS)
    with torch.no_grad():
        return call(inputs)


def apart(y: Tensor, other: Tensor) -> float:
    """Return the largest difference of two outputs, relative to the largest output."""
    return ((y.float() - other.float()).abs().max() / other.float().abs().max()).item()


def made(shape: AttentionShape, tiny: bool) -> AttentionInputs:
    """Return random inputs in bf16, which require gradients.

    Documents are equally long. In each row, they begin at other tokens.
    """
    window = shape.window
    documents = shape.documents
    if tiny:
        shape = TINY
        window = window and 16
        documents = min(documents, 3)
    sizes = [(shape.rows, shape.tokens, heads, shape.channels) for heads in (shape.heads, shape.kv_heads)]
    device = compute_device()
    q, k, v = (torch.randn(size, device=device).bfloat16().requires_grad_() for size in (*sizes, sizes[1]))
    if documents == 1:
        return AttentionInputs(q, k, v, window)
    length = shape.tokens // documents
    shifts = torch.arange(shape.rows) * (length // shape.rows)
    documents_BL = ((torch.arange(shape.tokens) + shifts[:, None]) // length).to(device)
    return AttentionInputs(q, k, v, window, documents_BL, None, document_boundaries(documents_BL))
