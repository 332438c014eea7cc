"""Messages between ranks without pickle: plain values as JSON, and named tensors as bytes.

torch's collectives for objects use pickle, and unpickling a message may run code that the sender has put into it. Any
process that reaches a job's ports may send messages. So the functions here parse only JSON and the bytes of tensors.
The messages are sent from host memory over gloo. If a group's backend cannot send from host memory, as with NCCL, the
messages are first copied to the device.

A plain value is None, a boolean, a number, text, a list, or a dictionary with string keys. The values are converted to
JSON and back even with one process, so a tuple always becomes a list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.device import compute_device

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
TYPES = {str(dtype): dtype for dtype in (*_FLOATS, *_INTEGERS)}


def all_gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather a plain value from each rank in a group; return the values by rank."""
    return [json.loads(_text(message)) for message in _all_gather_bytes(_bytes(value), group)]


def broadcast_value(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast a plain value from the process with global rank `source`, and return it on every rank in the group."""
    message = _bytes(value)
    if dist.get_world_size(group) > 1:
        device = device_of(group)
        size = torch.tensor([message.numel()], device=device)
        dist.broadcast(size, source, group=group)
        if dist.get_rank() == source:
            message = message.to(device)
        else:
            message = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(message, source, group=group)
    return json.loads(_text(message))


def converted(value: Any) -> Any:
    """Return a plain value as another rank would receive it."""
    return json.loads(json.dumps(value))


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device from whose memory a group sends: the CPU if its backend allows, else this process's device."""
    backends = dist.get_backend_config(group)
    if "cpu" in backends:
        return torch.device("cpu")
    return compute_device()


def all_gather_tensors(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> list[dict[str, Tensor]]:
    """All-gather named tensors over a group; return a dictionary for each rank, with the tensors on the CPU.

    Names, dtypes and shapes may differ between ranks. Raises TypeError on the sending rank if a tensor's dtype is not
    in TYPES.
    """
    for name, tensor in tensors.items():
        if str(tensor.dtype) not in TYPES:
            raise TypeError(f"tensor {name!r} is of {tensor.dtype}, which can't be sent; use one of {', '.join(TYPES)}")
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = all_gather_values(
        [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in on_cpu.items()], group
    )
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in on_cpu.values()]
    gathered = _all_gather_bytes(torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8), group)
    return [_taken_apart(message, about) for message, about in zip(gathered, described, strict=True)]


def _taken_apart(message: Tensor, described: Sequence[tuple[str, str, list[int]]]) -> dict[str, Tensor]:
    """Split the received bytes `message` into tensors; `described` has the name, dtype and shape of each tensor."""
    tensors: dict[str, Tensor] = {}
    first = 0
    for name, dtype, shape in described:
        whole = torch.empty(shape, dtype=TYPES[dtype])
        size = whole.numel() * whole.element_size()
        whole.reshape(-1).view(torch.uint8).copy_(message[first : first + size])
        tensors[name] = whole
        first += size
    return tensors


def _all_gather_bytes(message: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """All-gather byte tensors whose lengths may differ; they are padded for the transfer only."""
    count = dist.get_world_size(group)
    if count == 1:
        return [message]
    device = device_of(group)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([message.numel()], device=device), group=group)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: message.numel()] = message
    gathered = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(count)]
    dist.all_gather(gathered, padded, group=group)
    return [tensor[: int(size)].cpu() for tensor, size in zip(gathered, sizes, strict=True)]


def _bytes(value: Any) -> Tensor:
    """Return a plain value's JSON as a byte tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _text(message: Tensor) -> bytes:
    """Return a byte tensor's content."""
    return message.cpu().numpy().tobytes()
