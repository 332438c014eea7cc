"""Transformer Engine's layers, by a stand-in for the package: they take the place of ours under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.device import Package
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel, Place
from hybridtron.parallel import transformer_engine
from hybridtron.parallel.linear import TensorGroup
from tests.conftest import random_batch, small_config, small_model


class StandIn(nn.Module):
    """transformer_engine.pytorch.Linear as far as it is used: local sizes, no bias, a weight named `weight`."""

    def __init__(self, in_features: int, out_features: int, bias: bool, params_dtype: torch.dtype) -> None:
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandIn]]:
    module = SimpleNamespace(Linear=StandIn)
    monkeypatch.setattr(transformer_engine, "optional_package", lambda name: Package(name, module, "stand-in"))
    transformer_engine._linear.cache_clear()
    yield StandIn
    transformer_engine._linear.cache_clear()


@pytest.mark.usefixtures("alone")
def test_every_projection_is_its_and_computes_the_same(stand_in: type[StandIn]) -> None:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    model = LanguageModel(small_config(), Place(tensor=TensorGroup(group=group, transformer_engine=True)))
    initialise(model, seed=1)
    projections = [name for name, module in model.named_modules() if isinstance(module, stand_in)]
    assert len(projections) == 4 + 2 + 3 + 2 + 3  # Mamba, MLP, attention, MLP, attention
    batch = random_batch()
    ours = small_model()(batch.tokens_BL, None, batch.seq).output
    torch.testing.assert_close(model(batch.tokens_BL, None, batch.seq).output, ours)


def test_is_refused_where_it_is_not_installed() -> None:
    (problem,) = check(load(["parallel.transformer_engine=true"]))
    assert problem.key == "parallel.transformer_engine"
    assert "not installed" in problem.message
