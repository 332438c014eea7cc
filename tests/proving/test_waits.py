"""Waits of the host for a GPU, counted by torch's own warnings."""

from __future__ import annotations

import warnings

import pytest
import torch

from hybridtron.proving.gpu import recipes


def test_host_waits_on_a_cpu_are_none() -> None:
    with recipes.host_waits() as waits:
        torch.ones(1).item()
    assert waits == []


def test_host_waits_are_counted_by_warnings_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(recipes, "compute_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with recipes.host_waits() as waits:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert len(waits) == 2
    assert modes == ["warn", "default"]
