"""Activations that wait in the host's memory: the same bits, and no memory of the device between the passes."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

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
    made = LanguageModel(small_config(PATTERN), offload=sublayers)
    initialise(made, seed=1)
    return made


def gradients(sublayers: int) -> list[Tensor]:
    torch.manual_seed(2)
    batch = random_batch(documents=[[10, 14], [24]])
    language_model = model(sublayers)
    out = language_model(batch.tokens_BL, None, batch.seq).output
    return list(torch.autograd.grad(out.square().sum(), list(language_model.parameters())))


@pytest.mark.parametrize("sublayers", EVERY)
def test_the_gradients_are_the_same_to_the_bit(sublayers: int) -> None:
    assert all(map(torch.equal, gradients(sublayers), gradients(0)))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[object]]:
    """The storages that sub-layers have sent off."""
    found: list[weakref.ref[object]] = []
    store = offload.OffloadedSublayer.store

    def noted(self: offload.OffloadedSublayer) -> None:
        found.extend(weakref.ref(one.flat.untyped_storage()) for one in self._kept.values())
        store(self)

    monkeypatch.setattr(offload.OffloadedSublayer, "store", noted)
    return found


@pytest.mark.parametrize("sublayers", EVERY)
def test_between_the_passes_the_device_has_none_of_it(packed: list[weakref.ref[object]], sublayers: int) -> None:
    batch = random_batch()
    language_model = model(sublayers)
    out = language_model(batch.tokens_BL, None, batch.seq).output
    del batch  # with its tables of rotations
    assert len(packed) >= 3 * min(sublayers, 5)
    assert [one for one in packed if one() is not None] == []
    out.sum().backward()


def test_a_weight_and_what_is_small_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 100)
    weight = torch.nn.Parameter(torch.ones(64))
    large = torch.ones(64)
    small = torch.ones(24)
    kept = offload.OffloadedSublayer([weight])
    with kept.forward_pass():
        y = (weight.view(8, 8) * large.view(8, 8)).sum() + (weight[:24] * small).sum()
    kept.store()
    assert [one.flat.shape for one in kept._kept.values()] == [(64,)]
    large.zero_()  # it is away by now
    y.backward()
    assert torch.equal(weight.grad, torch.cat([torch.full((24,), 2.0), torch.ones(40)]))
