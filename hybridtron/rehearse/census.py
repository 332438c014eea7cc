"""Kernel census: a record of a step's operations, each with its bytes, FLOPs and source line.

The step is simulated without a GPU (rehearsed). Bytes are the memory traffic that an operation would cause on a GPU:
inputs that it reads, and outputs that it writes. Views and uninitialized tensors cost nothing. A tensor that is only
overwritten in place does not count as read. In a lookup table, only the selected rows count as read.

An operation's source line is the current line of this package's innermost frame in the call stack. In the backward
pass, autograd runs operations on its own threads, where the call stack has no such frame. A backward operation then
gets the source line of the forward operation whose gradient it computes. Autograd gives both operations the same
sequence number, which identifies the line.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtron.rehearse.memory_timeline import LiveMemory

PACKAGE = str(Path(__file__).parents[1])
SKIPPED = tuple(
    f"{PACKAGE}/{name}" for name in ("rehearse/", "ops/kernel_launch.py", "ops/precision.py", "ops/dispatch.py")
)
"""Files with helpers. An operation in one of these files gets the source line of the code that called the helper."""

PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "_grouped_mm"}
# operations that launch no kernel
NO_KERNEL = {
    "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "record_stream", "is_pinned", "lift_fresh", "device", "resize_", "set_",
}  # fmt: skip
# operations that overwrite their first argument without reading it
NOT_READ = {"copy_", "zero_", "fill_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"}
COPIES = {"_to_copy", "copy_"}
TO_HOST = "copy to the host"
FROM_HOST = "copy from the host"
PICKS = {"embedding", "gather", "index", "index_select"}  # operations that read a part of their first argument


@dataclass(frozen=True)
class Operation:
    """One launch of a Triton kernel or another package's kernel, or one torch operation, with its source line."""

    part: str  # forward, backward, or update
    place: str  # `ops/rope/reference.py:51`
    name: str
    bytes: int
    flops: int = 0
    kind: str = "torch"  # or "product", "attention", "kernel" (a Triton kernel of this project)
    variant: int = 0  # for kind "kernel": index of the distinct launch in `Launches.different`


@dataclass(frozen=True)
class Wait:
    """A wait by the host for the device, or by a stream for another stream, and its source line.

    `part` is the step's part: "build", "passes", "update", or a name that the caller has set in `Census.part`.
    """

    part: str
    place: str
    kind: str


@dataclass
class Sent:
    """One collective, point-to-point message, or copy between host and device.

    part           the step's part: "build", "passes" or "update"
    place          the call's source line
    kind           the function's name, or the copy's direction
    bytes          bytes sent by this rank
    ranks          how many ranks the group has
    between_nodes  whether ranks in the group are in different nodes
    asked          how many operations were recorded before the call
    waited         how many operations were recorded before the code waits for the call's result
    """

    part: str
    place: str
    kind: str
    bytes: int
    ranks: int
    between_nodes: bool
    asked: int
    waited: int


class Census(TorchDispatchMode):
    """Dispatch mode that records operations, waits, copies and memory in order.

    Enter the census inside the mode for fake tensors: torch calls the innermost mode first, so the census then gets
    every operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.waits: list[Wait] = []
        self.copies: list[Sent] = []  # asynchronous copies between host and device
        self.memory = LiveMemory(lambda: len(self.operations))
        self.part = "build"
        self._places: dict[int, str] = {}  # autograd's sequence number -> source line
        self._main = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = form_of(func)
        if form.name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            if on_device(args[0]):
                self.wait("item")
            return no_value(args[0].dtype)
        if form.name == "nonzero" and on_device(args[0]):
            self.wait("nonzero")
            return torch.zeros(1, args[0].dim(), dtype=torch.int64, device=args[0].device)
        place = self.place()
        out = func(*args, **kwargs)
        outputs = list(tensors_in((out,)))
        are_on_device = [on_device(x) for x in outputs]
        if form.counts:
            inputs = list(tensors_in((*args, *kwargs.values())))
            if any(are_on_device) or any(map(on_device, inputs)):
                self._count(form, args, kwargs, inputs, outputs, place)
        for tensor, is_on_device in zip(outputs, are_on_device, strict=True):
            if is_on_device:
                self.memory.note(tensor, place, self.part)
        return out

    def _count(
        self,
        form: OperationForm,
        args: Any,
        kwargs: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        place: str,
    ) -> None:
        """Record an operation. For a copy between host and device, also record the wait or the asynchronous copy."""
        name = form.name
        moved = moved_bytes(form, args, kwargs, outputs)
        if name in COPIES and not (kwargs.get("non_blocking") or args[2:3] == (True,)):
            if any(on_device(x) and not on_device(y) for x in inputs for y in outputs):
                self.wait("copy to the host")
            elif any(on_device(y) and not on_device(x) for x in inputs for y in outputs):
                self.wait("copy to the device")
        elif name == "copy_" and (direction := copy_direction(args)) is not None:
            now = len(self.operations)
            name = direction
            moved = args[0].nbytes
            self.copies.append(Sent(self.part, place, name, moved, 1, False, now, now))
        product = name in PRODUCTS
        flops = product_flops(name, args) if product else 0
        self.operations.append(Operation(self.now, place, name, moved, flops, "product" if product else "torch"))

    def arrived(self, copies: range) -> None:
        """Record that all later computation waits for the copies with these indices in `self.copies`."""
        for copy in self.copies[copies.start : copies.stop]:
            copy.waited = len(self.operations)

    @property
    def now(self) -> str:
        """Current part of the step. The part "passes" is divided into "forward" and "backward".

        The backward pass is recognized by its thread, because torch runs it on a thread of its own.
        """
        if self.part != "passes":
            return self.part
        if threading.get_ident() == self._main:
            return "forward"
        return "backward"

    def wait(self, kind: str) -> None:
        """Record a wait at the current line."""
        self.waits.append(Wait(self.part, self.place(), kind))

    def add(self, name: str, moved: int, flops: int, kind: str) -> None:
        """Record the launch of another package's kernel. Torch's operations do not show such launches."""
        self.operations.append(Operation(self.now, self.place(), name, moved, flops, kind))

    def add_kernel(self, name: str, moved: int, variant: int) -> None:
        """Record a launch of one of our own Triton kernels."""
        self.operations.append(Operation(self.now, self.place(), name, moved, kind="kernel", variant=variant))

    def place(self) -> str:
        """Return the current operation's source line (see the module's docstring).

        If no source line is found, return "autograd" in the backward pass, and "megatron" elsewhere.
        """
        line = innermost_line()
        if line is not None:
            if threading.get_ident() == self._main:
                self._places[torch._C._autograd._get_sequence_nr() - 1] = line
            return line
        node = torch._C._current_autograd_node()
        if node is None:
            return "megatron"
        return self._places.get(node._sequence_nr(), "autograd")


def no_value(dtype: torch.dtype) -> bool | int | float:
    """Return a placeholder for the value of a tensor with this dtype: False, 1.0 or 1.

    The training code reads tensors' values to check for errors. With these placeholders its checks pass.
    """
    if dtype == torch.bool:
        return False
    if dtype.is_floating_point:
        return 1.0
    return 1


def innermost_line() -> str | None:
    """Return `file:line` for the innermost frame in this package outside SKIPPED, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if (name := shown_file(frame.f_code.co_filename)) is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@cache
def shown_file(path: str) -> str | None:
    """Return a file's path relative to this package, or None for a file outside the package or in SKIPPED."""
    if path.startswith(PACKAGE) and not path.startswith(SKIPPED):
        return path[len(PACKAGE) + 1 :]
    return None


def size_of(tensor: Tensor) -> int:
    """Return a tensor's bytes in memory. Elements that are repeated by a stride of 0 count once."""
    stored = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(stored) * tensor.element_size()


@dataclass(frozen=True)
class OperationForm:
    """Properties that all calls to a torch operation share."""

    name: str
    # whether the census counts calls: False for views, uninitialized tensors and collectives (see `collectives.py`)
    counts: bool
    written: tuple[tuple[int, str], ...]  # index and name of each argument that the operation modifies


@cache
def form_of(func: Any) -> OperationForm:
    """Return an operation's properties, from torch's schema for the operation."""
    name = func.overloadpacket.__name__
    written = tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return OperationForm(name, not (func.namespace == "c10d" or func.is_view or name in NO_KERNEL), written)


def copy_direction(args: Any) -> str | None:
    """Return TO_HOST or FROM_HOST for a `copy_` between host and device, or None for a copy inside one memory."""
    target_on_device, source_on_device = map(on_device, args[:2])
    if target_on_device == source_on_device:
        return None
    if target_on_device:
        return FROM_HOST
    return TO_HOST


def on_device(tensor: Tensor) -> bool:
    """Return True for a tensor on the GPU.

    For a fake tensor, `fake_device` is read, because reading `is_cuda` would itself be an operation for the census.
    """
    if isinstance(tensor, FakeTensor):
        return tensor.fake_device.type == "cuda"
    return tensor.is_cuda


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors among the values and in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def moved_bytes(form: OperationForm, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    inputs = list(tensors_in((*args, *(value for name, value in kwargs.items() if name != "out"))))
    written = list(tensors_in(args[index] if index < len(args) else kwargs.get(name) for index, name in form.written))
    written_ids = {id(x) for x in written}
    unread = written_ids if form.name in NOT_READ else set()
    read = sum(size_of(x) for x in inputs if id(x) not in unread)
    if form.name in PICKS:
        read += sum(map(size_of, outputs)) - size_of(inputs[0])
    return read + sum(map(size_of, written)) + sum(size_of(x) for x in outputs if id(x) not in written_ids)


def product_flops(name: str, args: Any) -> int:
    """Return a matrix product's FLOPs; a multiply-add counts as two.

    In a grouped product, each row (or, in a weight's gradient, each column) of the first factor belongs to one group.
    """
    first, second = args[1:3] if "add" in name else args[:2]
    return 2 * first.numel() * second.shape[-1]
