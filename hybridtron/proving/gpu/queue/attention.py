"""Times all rows of the table in `hybridtron/ops/attention/table.py` side by side, on the shapes of training.

Each shape has a case for each row that this machine has and that takes the shape. A further case `order` has the rows
from fastest to slowest, and the row that the table chooses. If this is not the fastest row, the table's order is wrong
on this card.

A fast kernel may be wrong. So the output and gradients of every row are compared with those of the specification in
fp32 (case `reference`). A wrong row has no place in the order. Without a reference, a shape's rows are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.attention import AttentionInputs, AttentionMemory, reference
from hybridtron.ops.attention import attention as attention_op
from hybridtron.ops.attention.table import TABLE, AttentionRow, case_of
from hybridtron.ops.documents import document_boundaries
from hybridtron.ops.registry import attention_choice
from hybridtron.proving.gpu.queue.machine import fastest
from hybridtron.proving.gpu.queue.rows import Recorder, Row

ROUNDS = 5
CLOSE = 0.03  # largest allowed difference, relative to the largest value; bf16 keeps 8 bits
BLOCK = 256  # queries that the reference computes together


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
        expected: list[Tensor] = []
        with record.case(f"{label}: reference"):
            expected = exact(inputs)
        if not expected:
            continue
        for row in TABLE:
            if row.name == "flex" and not shape.compiles:
                continue
            if not record.tiny and (reason := unable(row, inputs)) is not None:
                record.write(f"{label}: {row.name}", "measured", {"available": False, "why": reason})
                continue
            with record.case(f"{label}: {row.name}") as numbers:
                actual = measured(row, inputs, record.tiny, numbers)
                numbers["apart"] = max(map(apart, actual, expected))
                assert numbers["apart"] < CLOSE, f"{row.name} differs by {numbers['apart']:.3g}"
                times[row.name] = numbers["both_ms"]
        chosen, _ = attention_choice(case_of(inputs), inputs.q_BLHK.device.type)
        order = sorted(times, key=lambda name: times[name])
        with record.case(f"{label}: order") as numbers:
            numbers |= {"chosen": chosen, "fastest first": " ".join(order), "right": order[:1] == [chosen]}


def unable(row: AttentionRow, inputs: AttentionInputs) -> str | None:
    """Return the reason why this machine can't run the row on these inputs, or None."""
    return attention_op.named(row.name).unavailable_reason("cuda") or row.refusal(case_of(inputs))


def measured(row: AttentionRow, inputs: AttentionInputs, tiny: bool, numbers: Row) -> list[Tensor]:
    """Put the milliseconds of the forward and backward pass into `numbers`, and return output and gradients.

    On a CPU with tiny sizes the op's own choice runs in place of the row.
    """
    call: Callable[[AttentionInputs], Tensor] = attention_op if tiny else row.function
    numbers["both_ms"] = 1e3 * fastest(lambda: results(call, inputs), 1 if tiny else ROUNDS)
    return results(call, inputs)


def results(call: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> list[Tensor]:
    """Run the forward and backward pass, and return the output and the gradients dq, dk and dv."""
    y = call(inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs[:3], torch.ones_like(y))]


def exact(inputs: AttentionInputs, block: int = BLOCK) -> list[Tensor]:
    """Compute `results` of the specification in fp32, for `block` queries at a time.

    The keys before a block are its remembered keys, so only one block's scores are stored.
    """
    q, k, v = leaves = [x.detach().float().requires_grad_() for x in inputs[:3]]
    rows = inputs._replace(q_BLHK=q, k_BLGK=k, v_BLGK=v)
    outputs = []
    gradients = [torch.zeros_like(leaf) for leaf in leaves]
    for start in range(0, q.shape[1], block):
        y = reference.attention(block_of(rows, start, start + block))
        outputs.append(y.detach())
        for total, gradient in zip(gradients, torch.autograd.grad(y, leaves, torch.ones_like(y)), strict=True):
            total += gradient
    return [torch.cat(outputs, dim=1), *gradients]


def block_of(inputs: AttentionInputs, start: int, stop: int) -> AttentionInputs:
    """Return the tokens `start` to `stop` - 1 of each row, with all keys before them as the memory."""
    q, k, v, window, documents_BL, *_ = inputs
    documents = None if documents_BL is None else documents_BL[:, start:stop]
    block = AttentionInputs(q[:, start:stop], k[:, start:stop], v[:, start:stop], window, documents)
    if start == 0:
        return block
    if documents_BL is None:
        length_B = torch.full((len(q),), start, device=q.device)
    else:
        length_B = (documents_BL[:, :start] == documents_BL[:, start, None]).sum(1)
    return block._replace(memory=AttentionMemory(k[:, :start], v[:, :start], length_B))


def apart(y: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value."""
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
