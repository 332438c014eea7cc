"""Scan a row chunk by chunk, with a backward pass that computes each chunk's inner values again.

Forward saves the inputs and the state before each chunk, and nothing from inside a chunk. The op supplies the
computation of one chunk (`Chunk`). The equations are in `chunked.py` of `scan`, `ssd`, `gla` and `delta`.

Legend: B rows, L tokens, T tokens of one chunk. A state is whatever an op carries from chunk to chunk.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Chunk(Protocol):
    """One chunk of a row: an op's forward and backward computation over its tokens."""

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return y (B, T, ...) and the state after the chunk, given the state before it."""
        ...

    def backward(
        self, state: Tensor, grad_y: Tensor, grad_state: Tensor
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...], Tensor]:
        """Return the gradients for per-token inputs (B, T, ...), for parameters, and for the state before the chunk.

        Parameters that are None are left out.
        """
        ...


class Row(Protocol):
    """The inputs of an op without its state, as a named tuple.

    First come the per-token tensors (B, L, ...), the first of them shaped like y, then the parameters, and last the
    tokens that begin documents.
    """

    PARAMETERS: int  # how many of the fields are parameters

    def chunk(self, tokens: slice) -> Chunk: ...


def chunks_of(tokens_BL: Tensor, size: int) -> list[slice]:
    """Cut a row's tokens into slices of `size` tokens; the last slice may end beyond the row."""
    return [slice(start, start + size) for start in range(0, tokens_BL.shape[1], size)]


def scan_chunks(row: Any, size: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Scan a `Row`, `size` tokens at a time; return y and the state after the row.

    Autocast is off, since a chunk's products have the types that its row gave them.
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
