"""One autograd function for all compiled recurrences on CPUs: scans, linear attention and the delta rule.

An op passes its inputs as a named tuple (`NativeRow`). The tuple's class attribute TASK is the ctypes structure with
the arguments of the op's compiled functions. The forward pass saves the inputs and the state before each chunk of
tokens; the backward pass recomputes each chunk from these tensors.

Legend: B rows (sequences in the batch), L tokens per row, K chunks. A state is (B, ...), with further axes that depend
on the op.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.native.library import call, constant, threads
from hybridtron.ops.native.tensors import LOG2E, Tokens, address, first_part, like, readable, scalar, starts_of


class NativeRow(Protocol):
    """A named tuple with an op's differentiable inputs.

    Its field names follow rules. For example, the field `dt` of the structure TASK passes an input `dt_BLH`, and the
    field `grad_dt` passes its gradient. The first input has y's shape, and the last input is the state. Inputs with
    `_BL` in their name have an entry per token. All other inputs, except the state, are parameters, in the state's
    dtype. A parameter with the name `A` is a decay rate. An input is None if the op does not use it.
    """

    NAME: str  # prefix of the names of the compiled functions, before `_forward` and `_backward`
    TASK: type[Any]  # the ctypes structure with the arguments of these functions
    # minimum work per thread, in tokens times state entries; with less work, a thread costs more time than it saves
    WORTH: int
    # Name of the TASK field that holds the number of channels (or heads) per row. A unit of work is a few of these
    # channels (or heads); TASK has their number in its field `unit`. All units of a row read the same inputs `b` and
    # `c`, so their gradients for `b` and `c` must be added up. UNITS_OF is "" if the op has no inputs `b` and `c`.
    UNITS_OF: str

    def sizes(self) -> dict[str, int]:
        """Return the integer fields of TASK by name, among them `rows` and `length`."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


def recurrence(row: NativeRow, documents_BL: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a compiled recurrence; return y in the first input's dtype, and the state after the row."""
    fields = row._asdict().values()
    return _NativeRecurrence.apply(type(row), torch.is_grad_enabled(), starts_of(documents_BL), *fields)


def matrix_recurrence(row: NativeRow, documents_BL: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a compiled recurrence whose state is a matrix per head; return y and the state after the row.

    The compiled code reads full SIMD vectors, so the state's last axis is padded before the call, and the padding is
    removed afterwards.
    """
    *fields, state = row._asdict().values()
    size = state.shape[-1]
    vector = constant("vector_bytes") // state.itemsize
    kind: Any = type(row)
    y_BL, last = recurrence(kind(*fields, torch.nn.functional.pad(state, (0, -size % vector))), documents_BL)
    return y_BL, last[..., :size]


class _NativeRecurrence(torch.autograd.Function):
    """Autograd function that saves the inputs and the state before each chunk."""

    @staticmethod
    def forward(
        ctx: Any, row_type: Any, recorded: bool, starts_BL: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, ...]:
        row = _as_read(row_type(*arguments))
        (*fields, last), task = row, _task(row, starts_BL)
        y_BL = like(fields[0])
        task.y = Tokens.of(y_BL)
        if recorded:
            chunks = -(-task.length // constant("chunk_tokens"))
            kept_BK = last.new_empty(task.rows, chunks, *last.shape[1:])
            task.kept = kept_BK.data_ptr()
            ctx.save_for_backward(starts_BL, kept_BK, *fields)
            ctx.row_type = row_type
            ctx.kinds = [None if tensor is None else tensor.dtype for tensor in arguments]
        call(f"{row.NAME}_forward_{scalar(last.dtype)}", task, _crew(row, task, last))
        return y_BL.to(arguments[0].dtype), last

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
    """Return the inputs as the compiled code reads them.

    The decay rate A is scaled, because the compiled code computes 2^x. The state is copied, because the compiled
    code overwrites it.
    """
    *fields, (_, state) = row._asdict().items()
    read = []
    for name, tensor in fields:
        if tensor is None or _by_token(name):
            read.append(None if tensor is None else readable(tensor))
        elif _short(name) == "A":  # clamped, because the compiled exponential needs finite arguments
            read.append((tensor * LOG2E).clamp(-1e30, 1e30).contiguous())
        else:
            read.append(tensor.contiguous())
    return row._make([*read, _dense_copy(state)])


def _task(row: NativeRow, starts_BL: Tensor | None) -> Any:
    """Return a structure TASK with the arguments that the forward and the backward function share."""
    fields = {_short(name): _seen(name, tensor) for name, tensor in row._asdict().items()}
    return row.TASK(**row.sizes(), **fields, starts=address(starts_BL))


def _room_for_gradients(row: NativeRow) -> dict[str, Tensor | None]:
    """Allocate the gradients for all inputs except the state.

    A parameter gets a gradient for each row. At the end, the compiled code adds all rows to the first row.
    """
    *fields, (_, state) = row._asdict().items()
    return {
        name: t if t is None else like(t) if _by_token(name) else t.new_zeros(len(state), *t.shape)
        for name, t in fields
    }


def _call_backward(row: NativeRow, task: Any, state: Tensor) -> None:
    """Run the compiled backward pass.

    If several threads compute one row, each unit of work (see UNITS_OF) writes its gradients of `b` and `c` to its own
    memory, and the compiled code adds them up.
    """
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
    """Return an input's name without its shape: `dt` for `dt_BLH`."""
    return name.partition("_")[0]


def _by_token(name: str) -> bool:
    return "_BL" in name


def _seen(name: str, tensor: Tensor | None) -> Tokens | int | None:
    if _by_token(name):
        return Tokens.of(tensor)
    return address(tensor)


def _dense_copy(state: Tensor) -> Tensor:
    return state.clone(memory_format=torch.contiguous_format)
