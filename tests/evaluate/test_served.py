"""The process groups of a checkpoint that several ranks read: none are left after the block, nor after an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hybridtron.config.load import load
from hybridtron.config.schema import ParallelConfig
from hybridtron.evaluate import served
from hybridtron.parallel import groups
from hybridtron.problems import Unusable

CONFIG = load(["recipe=laptop", "model.width=32", "model.vocab_size=64"])


def read(error: Exception | None) -> None:
    checkpoint: Any = SimpleNamespace(folder=Path(), meta=SimpleNamespace(step=1, data={}))
    tokenizer: Any = None
    with served._among_ranks(checkpoint, CONFIG, tokenizer, ParallelConfig()):
        assert dist.is_initialized()
        if error is not None:
            raise error


@pytest.fixture(autouse=True)
def without_weights(monkeypatch: pytest.MonkeyPatch):
    """Leave the model's weights as they are, and stop groups that a failed test has left."""
    monkeypatch.setattr(served, "fill", lambda checkpoint, model: None)
    yield
    groups.stop()


@pytest.mark.parametrize("error", [None, Unusable("no such text", code="no-file"), KeyError("text")])
def test_groups_end_with_the_block(error: Exception | None) -> None:
    if error is None:
        read(error)
    else:
        with pytest.raises(type(error)) as caught:
            read(error)
        assert caught.value is error
    assert not dist.is_initialized()
    read(None)  # other groups can be formed


def test_groups_end_if_weights_are_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(checkpoint: object, model: object) -> None:
        raise Unusable("damaged", code="unreadable")

    monkeypatch.setattr(served, "fill", refuse)
    with pytest.raises(Unusable, match="damaged"):
        read(None)
    assert not dist.is_initialized()
