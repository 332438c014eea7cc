"""One autograd function for all compiled recurrences. An op supplies its task structure, and tensors by field name.

Forward keeps its inputs and the state before every chunk of tokens, as the chunked forms do.

Legend: B rows, L tokens, K chunks. A state is (B, ...), with further axes that depend on the op.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.native.library import call, constant, threads
from hybridtron.ops.native.tensors import LOG2E, Tokens, address, first_part, like, readable, scalar, starts_of


class NativeRow(Protocol):
    """A named tuple of the differentiable inputs: `dt_BLH` fills the task's field `dt`, its gradient `grad_dt`.

    The first field has y's shape, the last is the state. The others are values per token (`_BL` in the name), and
    parameters in the type of the state; among these `A` is a decay rate. None marks an input that is not used.
    """

    NAME: str  # prefix of the library's functions, before `_forward` and `_backward`
    TASK: type[Any]  # the structure that they take
    WORTH: int  # tokens times state entries that repay one more thread, which costs some 20 us
    UNITS_OF: str  # the size whose units all add to the same gradients of `b` and `c`, or "" if the op has no units

    def sizes(self) -> dict[str, int]:
        """Return the task's integer fields, among them `rows` and `length`."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


def recurrence(row: NativeRow, documents_BL: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a compiled recurrence; return y in the type of the first input, and the state after the last token."""
    fields = row._asdict().values()
    return _NativeRecurrence.apply(type(row), torch.is_grad_enabled(), starts_of(documents_BL), *fields)


def matrix_recurrence(row: NativeRow, documents_BL: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a compiled recurrence over a matrix state; return y and the state after the last token.

    The compiled code takes full SIMD vectors: the state's last axis is padded before the call and cut afterwards.
    """
    *fields, state = row._asdict().values()
    size = state.shape[-1]
    vector = constant("vector_bytes") // state.itemsize
    kind: Any = type(row)
    y_BL, last = recurrence(kind(*fields, torch.nn.functional.pad(state, (0, -size % vector))), documents_BL)
    return y_BL, last[..., :size]


class _NativeRecurrence(torch.autograd.Function):
    """Autograd function that keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, row_type: Any, recorded: bool, starts_BL: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
        row = _as_read(row_type(*given))
        (*fields, last), task = row, _task(row, starts_BL)
        y_BL = like(fields[0])
        task.y = Tokens.of(y_BL)
        if recorded:
            chunks = -(-task.length // constant("chunk_tokens"))
            kept_BK = last.new_empty(task.rows, chunks, *last.shape[1:])
            task.kept = kept_BK.data_ptr()
            ctx.save_for_backward(starts_BL, kept_BK, *fields)
            ctx.row_type = row_type
            ctx.kinds = [None if tensor is None else tensor.dtype for tensor in given]
        call(f"{row.NAME}_forward_{scalar(last.dtype)}", task, _crew(row, task, last))
        return y_BL.to(given[0].dtype), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BL: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        starts_BL, kept_BK, *fields = ctx.saved_tensors
        grad_y_BL = readable(grad_y_BL)
        grad_state = _dense_copy(grad_last)
        row = ctx.row_type(*fields, grad_state)
        task = _task(row, starts_BL)
        grads = _room_for_gradients(row)
        task.kept, task.grad_y = kept_BK.data_ptr(), Tokens.of(grad_y_BL)
        for name, grad in grads.items():
            setattr(task, f"grad_{_short(name)}", _seen(name, grad))
        _call_backward(row, task, grad_state)
        of_fields = [grad if grad is None or _by_token(name) else first_part(grad) for name, grad in grads.items()]
        typed = (
            None if grad is None else grad.to(kind)
            for grad, kind in zip((*of_fields, grad_state), ctx.kinds, strict=True)
        )
        return None, None, None, *typed


def _as_read(row: Any) -> Any:
    """Prepare the tensors for the compiled code, with decay rates for 2^x and a copy of the state to write to."""
    *fields, (_, state) = row._asdict().items()
    read = []
    for name, tensor in fields:
        if tensor is None or _by_token(name):
            read.append(None if tensor is None else readable(tensor))
        elif _short(name) == "A":  # the compiled exponential takes finite numbers only
            read.append((tensor * LOG2E).clamp(-1e30, 1e30).contiguous())
        else:
            read.append(tensor.contiguous())
    return type(row)(*read, _dense_copy(state))


def _task(row: NativeRow, starts_BL: Tensor | None) -> Any:
    """Return a task with the fields that forward and backward have in common."""
    fields = {_short(name): _seen(name, tensor) for name, tensor in row._asdict().items()}
    return row.TASK(**row.sizes(), **fields, starts=address(starts_BL))


def _room_for_gradients(row: NativeRow) -> dict[str, Tensor | None]:
    """Allocate the gradients of all inputs but the state.

    A parameter gets one sum per row; the compiled code finally adds all of them to the first.
    """
    *fields, (_, state) = row._asdict().items()
    return {
        name: t if t is None else like(t) if _by_token(name) else t.new_zeros(len(state), *t.shape)
        for name, t in fields
    }


def _call_backward(row: NativeRow, task: Any, state: Tensor) -> None:
    """Run the compiled backward pass; where threads share a row, each unit writes its own gradients of `b` and `c`."""
    crew = _crew(row, task, state)
    shares = None
    if row.UNITS_OF:
        task.whole_rows = task.rows % crew == 0 or task.rows > 4 * crew
        units = -(-getattr(task, row.UNITS_OF) // task.unit)
        if not task.whole_rows:
            shares = state.new_empty(task.rows * units, task.length, 2, task.states)
        task.shares = address(shares)
    call(f"{row.NAME}_backward_{scalar(state.dtype)}", task, crew)


def _crew(row: NativeRow, task: Any, state: Tensor) -> int:
    return threads(task.length * state.numel() / row.WORTH)


def _short(name: str) -> str:
    """Return the name of a task's field without its shape: `dt` for `dt_BLH`."""
    return name.partition("_")[0]


def _by_token(name: str) -> bool:
    return "_BL" in name


def _seen(name: str, tensor: Tensor | None) -> Tokens | int | None:
    if _by_token(name):
        return Tokens.of(tensor)
    return address(tensor)


def _dense_copy(state: Tensor) -> Tensor:
    return state.clone(memory_format=torch.contiguous_format)
