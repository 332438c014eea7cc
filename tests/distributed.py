"""The gloo processes of the test session: started when a test first needs them, shared by all that follow."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

from hybridtron.parallel.pool import Pool


@functools.cache
def pool() -> Pool:
    """The session's one pool."""
    started = Pool()
    atexit.register(started.close)
    return started


def run_distributed(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 60.0
) -> list[Any]:
    """`function(seat, *arguments)` on `count` processes; the results by rank, or the child's traceback raised here.

    The function stands at the top of its module, so that the processes find it there.
    """
    return pool().run(function, world_size, *arguments, timeout_s=timeout_s)
