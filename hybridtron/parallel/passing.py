"""Passes bytes between the host memory of two ranks, in pieces, so that no rank holds all bytes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

PIECE = 2**24  # bytes of the largest message


def pieces_of(size: int) -> list[int]:
    """Return the sizes of the messages in which `size` bytes are passed."""
    whole, rest = divmod(size, PIECE)
    return [PIECE] * whole + [rest] * (rest > 0)


def pass_on(
    group: dist.ProcessGroup,
    outgoing: Iterator[Tensor],
    target: int,
    incoming: Sequence[int],
    source: int,
    take: Callable[[memoryview], None],
) -> None:
    """Send messages to the global rank `target`, and at the same time receive messages from the rank `source`.

    `outgoing` yields byte tensors, and `incoming` has the sizes of the messages that `source` sends. `take` gets each
    received message. A rank that only receives has an empty `outgoing`, and a rank that only sends an empty `incoming`.
    """
    for size in [*incoming, None]:
        sent = _send_next(group, outgoing, target)
        if size is None:
            while sent is not None:
                sent.wait()
                sent = _send_next(group, outgoing, target)
            return
        message = torch.empty(size, dtype=torch.uint8)
        received = dist.irecv(message, source, group)
        if sent is not None:
            sent.wait()
        assert received is not None
        received.wait()
        take(message.numpy().data)


def _send_next(group: dist.ProcessGroup, outgoing: Iterator[Tensor], target: int) -> dist.Work | None:
    """Begin to send the next message; return None if no message is left."""
    message = next(outgoing, None)
    if message is None:
        return None
    return dist.isend(message, target, group)
