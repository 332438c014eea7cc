"""A scan over a row, a chunk of tokens at a time, whose backward pass makes what is inside of a chunk again.

Forward keeps the inputs and the state before each chunk. What a chunk computes is the op's: `scan/chunked` and
`ssd/chunked` have the equations.

Legend: B rows, L tokens, T tokens of one chunk. A state is whatever an op carries from chunk to chunk.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Chunk(Protocol):
    """Some tokens of a row."""

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """y (B, T, ...), and the state after the chunk, from the state before it."""
        ...

    def backward(
        self, state: Tensor, grad_y: Tensor, grad_state: Tensor
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...], Tensor]:
        """Gradients of the inputs by token (B, T, ...), of parameters that are there, and of the state before it."""
        ...


class Row(Protocol):
    """An op's inputs: those by token (B, L, ...), of which the first is y's shape, its parameters, and borders."""

    PARAMETERS: int

    def chunks(self) -> list[slice]: ...

    def chunk(self, tokens: slice) -> Chunk: ...


def chunks_of(tokens_BL: Tensor, size: int) -> list[slice]:
    """A row's tokens in chunks of this many, the last one as long as what is left."""
    return [slice(start, start + size) for start in range(0, tokens_BL.shape[1], size)]


class ScanOfChunks(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, row_type: Any, state: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
        row: Row = row_type(*fields)
        y_BL = torch.empty_like(fields[0], memory_format=torch.contiguous_format)
        states_before = []
        for tokens in row.chunks():
            states_before.append(state)
            y_BL[:, tokens], state = row.chunk(tokens).forward(state)
        ctx.row_type = row_type
        ctx.save_for_backward(*fields, torch.stack(states_before))
        return y_BL, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BL: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        *fields, states_before = ctx.saved_tensors
        row: Row = ctx.row_type(*fields)
        token_grads = [None if t is None else torch.empty_like(t) for t in fields[: -1 - ctx.row_type.PARAMETERS]]
        totals: list[Tensor] = []
        for tokens, state in reversed(list(zip(row.chunks(), states_before, strict=True))):
            grad_y_BT = grad_y_BL[:, tokens].to(states_before.dtype)
            of_tokens, of_parameters, grad_state = row.chunk(tokens).backward(state, grad_y_BT, grad_state)
            for grad_BL, grad_BT in zip(token_grads, of_tokens, strict=True):
                if grad_BL is not None and grad_BT is not None:
                    grad_BL[:, tokens] = grad_BT
            totals = [a + b for a, b in zip(totals, of_parameters, strict=True)] if totals else list(of_parameters)
        parameters = fields[len(token_grads) : -1]
        remaining_totals = iter(totals)
        parameter_grads = (None if p is None else next(remaining_totals).to(p.dtype) for p in parameters)
        return None, grad_state, *token_grads, *parameter_grads, None
