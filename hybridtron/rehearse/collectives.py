"""Simulated collectives and point-to-point messages: calls are counted with their bytes, and send nothing.

A rehearsal simulates one rank's training step in one process, without a GPU and without other ranks. Each call counts
the bytes that this rank would send in a ring of r ranks. For a full tensor with n bytes, an all-gather or a
reduce-scatter sends n * (r - 1) / r bytes, and an all-reduce sends twice this number of bytes.

While a blocking call runs, nothing is computed. A call that returns a handle overlaps with all computation until the
code waits for the handle.

The functions of torch.distributed must be replaced before megatron-core is imported, because megatron-core imports some
of these functions by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybridtron.rehearse.census import Census, Sent


class SentHandle:
    """Handle for an asynchronous call, or for several calls that are started together.

    `wait` records in each call's entry the number of operations that were counted before the wait.
    """

    def __init__(self, calls: list[Sent], census: Census | None) -> None:
        self.calls = calls
        self.census = census

    def wait(self, *_: Any) -> bool:
        for call in self.calls:
            call.waited = max(call.waited, 0 if self.census is None else len(self.census.operations))
        return True

    def is_completed(self) -> bool:
        return True


MESSAGE = 0  # replaces the factor in COUNTED for point-to-point messages, which send all bytes of their tensor
COUNTED: dict[str, tuple[str, int]] = {
    "all_reduce": ("tensor", 2),
    "all_gather_into_tensor": ("output_tensor", 1),
    "reduce_scatter_tensor": ("input", 1),
    "all_to_all_single": ("input", 1),
    "broadcast": ("tensor", 1),
    "isend": ("tensor", MESSAGE),
    "send": ("tensor", MESSAGE),
}
"""Function -> (name of its argument with the full tensor, factor f).

For a tensor with n bytes, each of r ranks sends f * n * (r - 1) / r bytes. If f is MESSAGE, the sender sends n bytes.
"""
RECEIVED = ("irecv", "recv")  # replaced too, but not counted, because they send nothing
# older names of these functions, which are replaced too
OLD_NAMES = {"all_gather_into_tensor": "_all_gather_base", "reduce_scatter_tensor": "_reduce_scatter_base"}


class Collectives:
    """Replacements for functions of torch.distributed. The replacements record each call.

    `node` is the number of GPUs in a node. A census is the record of a rehearsed step (`census.py`).
    """

    def __init__(self, node: int) -> None:
        self.node = node
        self.census: Census | None = None
        self.calls: list[Sent] = []
        self._together: list[Sent] | None = None

    def begin(self, census: Census) -> list[Sent]:
        """Start recording for this census, and return a new list to which an entry for each call is appended."""
        self.census = census
        self.calls = []
        return self.calls

    def install(self) -> None:
        """Replace the functions, until the process ends."""
        for name in (*COUNTED, *RECEIVED):
            function = self._counted(name, getattr(distributed_c10d, name))
            _replace(function, name, *filter(None, [OLD_NAMES.get(name)]))
        _replace(self._started_together, "_coalescing_manager")
        _replace(_gathered_objects, "all_gather_object")
        _replace(lambda *_, **__: None, "barrier")

    def _counted(self, name: str, function: Any) -> Callable[..., Any]:
        """Return a replacement for `function` with the same parameters; it records calls and sends nothing.

        The replacements for isend and irecv always return a handle. Other functions return a handle only with
        async_op=True.
        """
        signature = inspect.signature(function)
        blocking = not name.startswith("i")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if name in RECEIVED:
                calls = []
            else:
                calls = self._note(name, bound.arguments)
            waited = not bound.arguments.get("async_op", not blocking)
            if waited:
                return None
            return SentHandle(calls, self.census)

        return call

    def _note(self, name: str, arguments: dict[str, Any]) -> list[Sent]:
        """Record a call, and return a list with the call's entry.

        Calls on CPU tensors or in a group with one rank are not recorded, and the list is empty.
        """
        argument, times = COUNTED[name]
        tensor = arguments[argument]
        census = self.census
        ranks = dist.get_process_group_ranks(arguments["group"] or dist.group.WORLD)
        if census is None or not tensor.is_cuda or len(ranks) == 1:
            return []
        moved = tensor.numel() * tensor.element_size()
        size = len(ranks)
        if times == MESSAGE:
            sent = moved
        else:
            sent = times * moved * (size - 1) // size
        nodes = {rank // self.node for rank in ranks}
        now = len(census.operations)
        call = Sent(census.part, census.place(), name, sent, size, len(nodes) > 1, now, now)
        self.calls.append(call)
        if self._together is not None:
            self._together.append(call)
        return [call]

    @contextlib.contextmanager
    def _started_together(self, *_: Any, **__: Any) -> Iterator[SentHandle]:
        """Replace `_coalescing_manager`: yield one handle for all calls that are started inside the block."""
        outer = self._together
        self._together = []
        try:
            yield SentHandle(self._together, self.census)
        finally:
            self._together = outer


def _replace(function: Any, *names: str) -> None:
    for module in (distributed_c10d, dist):
        for name in names:
            setattr(module, name, function)


def _gathered_objects(values: list[Any], value: Any, group: Any = None) -> None:
    """Replace `all_gather_object`: fill the list with this rank's value."""
    values[:] = [value] * len(values)
