"""Activations that wait in the host's memory: the same bits, and no memory of the device between the passes."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.table import architecture
from hybridtron.model import offload
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from tests.conftest import random_batch, small_config

PATTERN = "M-WS-"
EVERY = (1, 3, 5, 9)  # more than there are is all


@pytest.fixture(autouse=True)
def small_tensors_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 1)


def model(sublayers: int) -> LanguageModel:
    language_model = LanguageModel(architecture(small_config(PATTERN)), offload=sublayers)
    initialise(language_model, seed=1)
    return language_model


def gradients(sublayers: int) -> list[Tensor]:
    torch.manual_seed(2)
    batch = random_batch(documents=[[10, 14], [24]])
    language_model = model(sublayers)
    out = language_model(batch.tokens_BL, None, batch.seq).output
    return list(torch.autograd.grad(out.square().sum(), list(language_model.parameters())))


@pytest.mark.parametrize("sublayers", EVERY)
def test_offloading_changes_no_bit_of_the_gradients(sublayers: int) -> None:
    assert all(map(torch.equal, gradients(sublayers), gradients(0)))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[object]]:
    """The storages that sub-layers have sent off."""
    storages: list[weakref.ref[object]] = []
    store = offload.OffloadedSublayer.store

    def noted(self: offload.OffloadedSublayer) -> None:
        storages.extend(weakref.ref(tensor.flat.untyped_storage()) for tensor in self._kept.values())
        store(self)

    monkeypatch.setattr(offload.OffloadedSublayer, "store", noted)
    return storages


@pytest.mark.parametrize("sublayers", EVERY)
def test_device_holds_no_offloaded_tensor_between_the_passes(packed: list[weakref.ref[object]], sublayers: int) -> None:
    batch = random_batch()
    language_model = model(sublayers)
    out = language_model(batch.tokens_BL, None, batch.seq).output
    del batch  # with its tables of rotations
    assert len(packed) >= 3 * min(sublayers, 5)
    assert [storage for storage in packed if storage() is not None] == []
    out.sum().backward()


def test_weights_and_small_tensors_are_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 100)
    weight = torch.nn.Parameter(torch.ones(64))
    large = torch.ones(64)
    small = torch.ones(24)
    kept = offload.OffloadedSublayer([weight])
    with kept.forward_pass():
        y = (weight.view(8, 8) * large.view(8, 8)).sum() + (weight[:24] * small).sum()
    kept.store()
    assert [tensor.flat.shape for tensor in kept._kept.values()] == [(64,)]
    large.zero_()  # it is away by now
    y.backward()
    assert torch.equal(weight.grad, torch.cat([torch.full((24,), 2.0), torch.ones(40)]))
