"""The process groups of a checkpoint that several ranks read: none are left after the block, nor after an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import ParallelConfig
from hybridtron.evaluate import loaded_model
from hybridtron.parallel import groups
from hybridtron.problems import Unusable
from tests.refusals import raises_code

PLAN = RunPlan.of(load(["recipe=laptop", "model.width=32", "model.vocab_size=64"]))


def read(error: Exception | None) -> None:
    meta = SimpleNamespace(step=1, data={})
    checkpoint: Any = SimpleNamespace(folder=Path(), meta=meta, config=PLAN.config, plan=PLAN)
    tokenizer: Any = None
    with loaded_model._divided_model(checkpoint, PLAN.arch, tokenizer, ParallelConfig()):
        assert dist.is_initialized()
        if error is not None:
            raise error


@pytest.fixture(autouse=True)
def without_weights(monkeypatch: pytest.MonkeyPatch):
    """Leave the model's weights as they are, and stop groups that a failed test has left."""
    monkeypatch.setattr(loaded_model, "fill", lambda checkpoint, model: None)
    yield
    groups.stop()


@pytest.mark.parametrize("error", [None, Unusable("no such text", code="no-file"), KeyError("text")])
def test_process_groups_end_after_serving(error: Exception | None) -> None:
    if error is None:
        read(error)
    else:
        with pytest.raises(type(error)) as caught:
            read(error)
        assert caught.value is error
    assert not dist.is_initialized()
    read(None)  # other groups can be formed


def test_process_groups_end_after_damaged_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(checkpoint: object, model: object) -> None:
        raise Unusable("damaged", code="unreadable")

    monkeypatch.setattr(loaded_model, "fill", refuse)
    with raises_code(Unusable, "unreadable"):
        read(None)
    assert not dist.is_initialized()
