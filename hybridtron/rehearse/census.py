"""Counts what a step asks of its device: every operation of torch, with launches, bytes, FLOPs and the line it is of.

Bytes are those that must go to and from the device's memory: what an operation reads, and what it writes; views and
empty tensors cost nothing. A tensor that is written in place and not looked at is not read; of a table only the rows
that are picked are.

The line is the innermost one of this package. In the backward pass, where torch runs what a line has recorded, it is
found by the number that autograd gives to each recorded operation.
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

from hybridtron.rehearse.live import LiveMemory

PACKAGE = str(Path(__file__).parents[1])
SKIPPED = tuple(
    f"{PACKAGE}/{name}" for name in ("rehearse/", "ops/kernel_launch.py", "ops/precision.py", "ops/dispatch.py")
)
"""Files whose lines say nothing of where an operation comes from; those that call them do."""

PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm"}
NOTHING = {
    "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "record_stream", "is_pinned", "lift_fresh", "device", "resize_", "set_",
}  # fmt: skip
NOT_READ = {"copy_", "zero_", "fill_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"}  # what they write
COPIES = {"_to_copy", "copy_"}
TO_HOST = "copy to the host"
FROM_HOST = "copy from the host"
PICKS = {"embedding", "gather", "index", "index_select"}  # rows of their first argument


@dataclass(frozen=True)
class Operation:
    """One kernel, or as torch sees it one operation, and where it comes from."""

    part: str  # forward, backward, or update
    place: str  # `ops/rope/reference.py:51`
    name: str
    bytes: int
    flops: int = 0
    kind: str = "torch"  # or product, attention, kernel (of our own)
    variant: int = 0  # of a kernel: which of its compiled forms


@dataclass(frozen=True)
class Wait:
    """The host waits for the device, or a stream for another."""

    part: str
    place: str
    kind: str


@dataclass
class Sent:
    """One call. `asked` and `waited`: how many operations were counted before the call, and before it is waited for."""

    part: str
    place: str
    kind: str
    bytes: int  # that this rank sends
    ranks: int
    between_nodes: bool
    asked: int
    waited: int


class Census(TorchDispatchMode):
    """The operations, waits and memory of what runs inside, in order. It stands outside of the fake tensors' mode."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.waits: list[Wait] = []
        self.copies: list[Sent] = []  # to the host and from it, which it does not wait for
        self.memory = LiveMemory(lambda: len(self.operations))
        self.part = "build"
        self._places: dict[int, str] = {}  # by autograd's number of a recorded operation
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
        made = list(tensors_in((out,)))
        there = [on_device(x) for x in made]
        if form.counts:
            given = list(tensors_in((*args, *kwargs.values())))
            if any(there) or any(map(on_device, given)):
                self._count(form, args, kwargs, given, made, place)
        for tensor, is_there in zip(made, there, strict=True):
            if is_there:
                self.memory.note(tensor, place, self.part)
        return out

    def _count(
        self, form: OperationForm, args: Any, kwargs: Any, given: Sequence[Tensor], made: Sequence[Tensor], place: str
    ) -> None:
        name = form.name
        moved = moved_bytes(form, args, kwargs, made)
        if name in COPIES and not (kwargs.get("non_blocking") or args[2:3] == (True,)):
            if any(on_device(x) and not on_device(y) for x in given for y in made):
                self.wait("copy to the host")
            elif any(on_device(y) and not on_device(x) for x in given for y in made):
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
        """What is computed from now on waits for these copies."""
        for copy in self.copies[copies.start : copies.stop]:
            copy.waited = len(self.operations)

    @property
    def now(self) -> str:
        """The part of the step that is under way: torch runs the backward pass of a GPU on a thread of its own."""
        if self.part != "passes":
            return self.part
        if threading.get_ident() == self._main:
            return "forward"
        return "backward"

    def wait(self, kind: str) -> None:
        """The line that runs waits."""
        self.waits.append(Wait(self.part, self.place(), kind))

    def add(self, name: str, moved: int, flops: int, kind: str) -> None:
        """A kernel of another package, which torch's operations do not show."""
        self.operations.append(Operation(self.now, self.place(), name, moved, flops, kind))

    def add_kernel(self, name: str, moved: int, variant: int) -> None:
        """A kernel of our own."""
        self.operations.append(Operation(self.now, self.place(), name, moved, kind="kernel", variant=variant))

    def place(self) -> str:
        """The line of this package that the running operation comes from."""
        found = innermost_line()
        if found is not None:
            if threading.get_ident() == self._main:
                self._places[torch._C._autograd._get_sequence_nr() - 1] = found
            return found
        node = torch._C._current_autograd_node()
        if node is None:
            return "megatron"
        return self._places.get(node._sequence_nr(), "autograd")


def no_value(dtype: torch.dtype) -> bool | int | float:
    """What stands for a value that is asked for: finite, and no reason to stop."""
    if dtype == torch.bool:
        return False
    if dtype.is_floating_point:
        return 1.0
    return 1


def innermost_line() -> str | None:
    """`file:line` of the innermost frame of this package that says where it is."""
    frame = sys._getframe(1)
    while frame is not None:
        if (name := shown_file(frame.f_code.co_filename)) is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@cache
def shown_file(path: str) -> str | None:
    """Of this package the name in it, where it says where an operation comes from."""
    if path.startswith(PACKAGE) and not path.startswith(SKIPPED):
        return path[len(PACKAGE) + 1 :]
    return None


def size_of(tensor: Tensor) -> int:
    """Bytes in memory; what is repeated without being stored counts once."""
    stored = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(stored) * tensor.element_size()


@dataclass(frozen=True)
class OperationForm:
    """What holds for every call of one of torch's operations."""

    name: str
    counts: bool  # views and empty tensors cost nothing; collectives are counted where they are called
    written: tuple[tuple[int, str], ...]  # places and names of the arguments that it changes, as its schema says


@cache
def form_of(func: Any) -> OperationForm:
    """Of an operation."""
    name = func.overloadpacket.__name__
    written = tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return OperationForm(name, not (func.namespace == "c10d" or func.is_view or name in NOTHING), written)


def copy_direction(args: Any) -> str | None:
    """Of `copy_`: whether it is to the host or from it."""
    to, of = map(on_device, args[:2])
    if to == of:
        return None
    if to:
        return FROM_HOST
    return TO_HOST


def on_device(tensor: Tensor) -> bool:
    """As `is_cuda` says; of a fake tensor that question would be an operation again."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_device.type == "cuda"
    return tensor.is_cuda


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among them, and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def moved_bytes(form: OperationForm, args: Any, kwargs: Any, made: Sequence[Tensor]) -> int:
    """Read and written."""
    given = list(tensors_in((*args, *(value for name, value in kwargs.items() if name != "out"))))
    written = list(tensors_in(args[index] if index < len(args) else kwargs.get(name) for index, name in form.written))
    own = {id(x) for x in written}
    unread = own if form.name in NOT_READ else set()
    read = sum(size_of(x) for x in given if id(x) not in unread)
    if form.name in PICKS:
        read += sum(map(size_of, made)) - size_of(given[0])
    return read + sum(map(size_of, written)) + sum(size_of(x) for x in made if id(x) not in own)


def product_flops(name: str, args: Any) -> int:
    """A multiply-add counts two."""
    first, second = args[1:3] if "add" in name else args[:2]
    return 2 * first.numel() * second.shape[-1]
