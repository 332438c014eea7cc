"""Scan sequences in chunks of tokens, with a backward pass that recomputes each chunk's intermediate tensors.

The forward pass saves the inputs and the state before each chunk. It saves no tensor from inside a chunk. An op that
uses this file defines two classes: a `Row` holds the op's inputs, and a `Chunk` computes one chunk. The classes of the
ops `scan`, `ssd`, `gla` and `delta` are in the file `chunked.py` of each op, together with the op's equations.

Legend: B sequences (rows) in a batch, L tokens in a sequence, T tokens per chunk. A state is the tensor that an op
carries from chunk to chunk.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Chunk(Protocol):
    """An op's forward and backward computation for one chunk: T tokens of each of the B sequences."""

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (B, T, ...) and the state after the chunk, given the state before it."""
        ...

    def backward(
        self, state: Tensor, grad_y: Tensor, grad_state: Tensor
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...], Tensor]:
        """Return the gradients of per-token inputs (B, T, ...), of parameters, and of the state before the chunk.

        The first tuple has an entry for every per-token input; the entry is None if that input is None. The second
        tuple has no entry for a parameter that is None.
        """
        ...


class Row(Protocol):
    """A named tuple of an op's inputs for all sequences in a batch. The state is not a field.

    The first fields are the per-token tensors (B, L, ...). Field 0 is never None, and has the shape of the output y;
    the other per-token tensors may be None. The parameters follow, and may be None too. The last field is None, or a
    mask (B, L) of the tokens that begin a document.
    """

    PARAMETERS: int  # number of parameter fields

    def chunk(self, tokens: slice) -> Chunk: ...


def chunks_of(tokens_BL: Tensor, size: int) -> list[slice]:
    """Return slices of `size` tokens that cover L tokens; the last slice may extend past L."""
    return [slice(start, start + size) for start in range(0, tokens_BL.shape[1], size)]


def scan_chunks(row: Any, size: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Scan a `Row`, `size` tokens at a time; return y and the state after the last token.

    `Row.chunk` converts each chunk's tensors to the dtype to compute in. Autocast is turned off, because it would
    convert these tensors back to a narrow dtype.
    """
    with torch.autocast(state.device.type, enabled=False):
        return _ScanOfChunks.apply(type(row), size, state, *row)


class _ScanOfChunks(torch.autograd.Function):
    """Autograd function that saves only the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, row_type: Any, size: int, state: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
        row: Row = row_type(*fields)
        y_BL = torch.empty_like(fields[0], memory_format=torch.contiguous_format)
        states_before = []
        for tokens in chunks_of(fields[0], size):
            states_before.append(state)
            y_BL[:, tokens], state = row.chunk(tokens).forward(state)
        ctx.row_type = row_type
        ctx.size = size
        ctx.save_for_backward(*fields, torch.stack(states_before))
        return y_BL, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BL: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        *fields, states_before = ctx.saved_tensors
        row: Row = ctx.row_type(*fields)
        token_grads = [None if t is None else torch.empty_like(t) for t in fields[: -1 - ctx.row_type.PARAMETERS]]
        totals: list[Tensor] = []
        for tokens, state in reversed(list(zip(chunks_of(fields[0], ctx.size), states_before, strict=True))):
            grad_y_BT = grad_y_BL[:, tokens].to(states_before.dtype)
            of_tokens, of_parameters, grad_state = row.chunk(tokens).backward(state, grad_y_BT, grad_state)
            for grad_BL, grad_BT in zip(token_grads, of_tokens, strict=True):
                if grad_BL is not None and grad_BT is not None:
                    grad_BL[:, tokens] = grad_BT
            if totals:
                totals = [a + b for a, b in zip(totals, of_parameters, strict=True)]
            else:
                totals = list(of_parameters)
        parameters = fields[len(token_grads) : -1]
        remaining_totals = iter(totals)
        parameter_grads = (None if p is None else next(remaining_totals).to(p.dtype) for p in parameters)
        return None, None, grad_state, *token_grads, *parameter_grads, None
