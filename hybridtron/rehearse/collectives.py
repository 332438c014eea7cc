"""Simulated collectives and messages: each call is counted with its bytes, ranks and overlap, and sends nothing.

The rehearsed rank runs alone. Each call counts the bytes that this rank would send in a ring with r ranks. For a tensor
of n bytes these are n (r - 1) / r in an all-gather or a reduce-scatter, and twice that in an all-reduce. A blocking
call is exposed. A call that returns a handle overlaps with all computation until the handle is waited for.

The functions are replaced before megatron-core is imported, which binds some of them to its own names.
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
    """Handle for an asynchronous call, or for several calls that are started together."""

    def __init__(self, calls: list[Sent], census: Census | None) -> None:
        self.calls = calls
        self.census = census

    def wait(self, *_: Any) -> bool:
        for call in self.calls:
            call.waited = max(call.waited, 0 if self.census is None else len(self.census.operations))
        return True

    def is_completed(self) -> bool:
        return True


MESSAGE = 0  # in place of a factor: a message sends all its bytes
COUNTED: dict[str, tuple[str, int]] = {
    "all_reduce": ("tensor", 2),
    "all_gather_into_tensor": ("output_tensor", 1),
    "reduce_scatter_tensor": ("input", 1),
    "all_to_all_single": ("input", 1),
    "broadcast": ("tensor", 1),
    "isend": ("tensor", MESSAGE),
    "send": ("tensor", MESSAGE),
}
"""Function -> the argument whose bytes count, and the factor: a rank sends that many times (r - 1) / r of them."""
RECEIVED = ("irecv", "recv")
OLD_NAMES = {"all_gather_into_tensor": "_all_gather_base", "reduce_scatter_tensor": "_reduce_scatter_base"}


class Collectives:
    """Replacements for torch.distributed's functions, which count for the current census. Nodes have `node` GPUs."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.census: Census | None = None
        self.calls: list[Sent] = []
        self._together: list[Sent] | None = None

    def begin(self, census: Census) -> list[Sent]:
        """Start to count for this census. Returns the list that calls are appended to."""
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
        """Return a replacement for a function, with the same parameters."""
        signature = inspect.signature(function)
        at_once = not name.startswith("i")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if name in RECEIVED:
                calls = []
            else:
                calls = self._note(name, bound.arguments)
            waited = not bound.arguments.get("async_op", not at_once)
            if waited:
                return None
            return SentHandle(calls, self.census)

        return call

    def _note(self, name: str, given: dict[str, Any]) -> list[Sent]:
        """Record a call on device tensors between several ranks. Returns a list with the record, or an empty one."""
        argument, times = COUNTED[name]
        tensor = given[argument]
        census = self.census
        ranks = dist.get_process_group_ranks(given["group"] or dist.group.WORLD)
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
        """Replace `_coalescing_manager`: yield one handle for all calls that are started inside."""
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


def _gathered_objects(found: list[Any], value: Any, group: Any = None) -> None:
    """Replace `all_gather_object`: fill the list with this rank's value."""
    found[:] = [value] * len(found)
