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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Census(TorchDispatchMode):
    """The operations, waits and memory of what runs inside, in order. It stands outside of the fake tensors' mode."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.waits: list[Wait] = []
        self.memory = LiveMemory(lambda: len(self.operations))
        self.part = "build"
        self._places: dict[int, str] = {}  # by autograd's number of a recorded operation
        self._main = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            if args[0].is_cuda:
                self.wait("item")
            return no_value(args[0].dtype)
        if name == "nonzero" and args[0].is_cuda:
            self.wait("nonzero")
            return torch.zeros(1, args[0].dim(), dtype=torch.int64, device=args[0].device)
        place = self.place()
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if any(x.is_cuda for x in (*given, *made)):
            self._count(func, args, kwargs, given, made, place)
        for tensor in made:
            if tensor.is_cuda:
                self.memory.note(tensor, place, self.part)
        return out

    def _count(
        self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], made: Sequence[Tensor], place: str
    ) -> None:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" or func.is_view or name in NOTHING:
            return  # collectives are counted where they are called
        if name in COPIES and not (kwargs.get("non_blocking") or args[2:3] == (True,)):
            if any(x.is_cuda and not y.is_cuda for x in given for y in made):
                self.wait("copy to the host")
            elif any(y.is_cuda and not x.is_cuda for x in given for y in made):
                self.wait("copy to the device")
        moved = moved_bytes(func, args, kwargs, given, made)
        product = name in PRODUCTS
        flops = product_flops(name, args) if product else 0
        self.operations.append(Operation(self.now, place, name, moved, flops, "product" if product else "torch"))

    @property
    def now(self) -> str:
        """The part of the step that is under way: torch runs the backward pass of a GPU on a thread of its own."""
        if self.part != "passes":
            return self.part
        return "forward" if threading.get_ident() == self._main else "backward"

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
        return "megatron" if node is None else self._places.get(node._sequence_nr(), "autograd")


def no_value(dtype: torch.dtype) -> bool | int | float:
    """What stands for a value that is asked for: finite, and no reason to stop."""
    return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def innermost_line() -> str | None:
    """`file:line` of the innermost frame of this package that says where it is."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.startswith(SKIPPED):
            return f"{file[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def size_of(tensor: Tensor) -> int:
    """Bytes in memory; what is repeated without being stored counts once."""
    stored = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(stored) * tensor.element_size()


def moved_bytes(func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Read and written."""
    name = func.overloadpacket.__name__
    written = list(_written(func, args, kwargs))
    own = {id(x) for x in written}
    unread = own if name in NOT_READ or "out" in kwargs else set()
    read = sum(size_of(x) for x in given if id(x) not in unread)
    if name in PICKS:
        read += sum(map(size_of, made)) - size_of(given[0])
    return read + sum(map(size_of, written)) + sum(size_of(x) for x in made if id(x) not in own)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The arguments that the operation changes, as its schema says."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(value) if isinstance(x, Tensor))


def product_flops(name: str, args: Any) -> int:
    """A multiply-add counts two."""
    first, second = args[1:3] if "add" in name else args[:2]
    return 2 * first.numel() * second.shape[-1]
