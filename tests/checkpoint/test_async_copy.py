"""Copies for asynchronous checkpoints lie in memory that is pinned on CUDA, and that the next checkpoint reuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron import device
from hybridtron.checkpoint import async_copy
from hybridtron.checkpoint.async_copy import Copier
from hybridtron.parallel.blocks import block


def blocks_of(*values: float) -> dict[str, list[Any]]:
    tensors = [torch.full((4,), value) for value in values]
    return {"model": [block(f"w{number}", (4,), (0,), t, main=True) for number, t in enumerate(tensors)]}


def test_checkpoints_reuse_the_memory_of_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[Tensor] = []

    def allocate(tensor: Tensor) -> Tensor:
        allocated.append(torch.empty_like(tensor))
        return allocated[-1]

    monkeypatch.setattr(async_copy, "host_memory_for", allocate)
    copier = Copier()
    for first in (1.0, 5.0):
        copied = copier.start(blocks_of(first, 2.0)).blocks()["model"]
        assert [entry.data[0].item() for entry in copied] == [first, 2.0]
        assert {entry.data.data_ptr() for entry in copied} == {memory.data_ptr() for memory in allocated}
    assert len(allocated) == 2


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_memory_for_copies_is_pinned_on_cuda_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine of the tests has CUDA, so the request is recorded."""
    requests: list[dict[str, Any]] = []
    empty = torch.empty

    def recorded(*size: Any, pin_memory: bool, **options: Any) -> Tensor:
        requests.append({"pin_memory": pin_memory, **options})
        return empty(*size, **options)

    monkeypatch.setattr(device, "compute_device", lambda: torch.device(kind))
    monkeypatch.setattr(torch, "empty", recorded)
    memory = device.host_memory_for(torch.zeros(3, 2, dtype=torch.bfloat16))
    assert (memory.shape, memory.dtype, memory.device.type) == ((3, 2), torch.bfloat16, "cpu")
    assert [request["pin_memory"] for request in requests] == [kind == "cuda"]
