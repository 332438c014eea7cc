"""A small engine that has trained, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import CheckpointConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from tests.conftest import random_batch, small_run

Write = Callable[..., Path]


def trained(groups: Groups, precision: str = "fp32", steps: int = 2) -> Engine:
    engine = Engine(resolve(small_run(precision=precision))[0], groups)
    for _ in range(steps):
        engine.forward_backward([random_batch()])
        engine.step(1e-2)
    return engine


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the checkpoint of a step into tmp_path, the run's folder; the folder of the checkpoint."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")

    def write(
        engine: Engine, step: int = 7, validation: float | None = None, settings: CheckpointConfig | None = None
    ) -> Path:
        engine.config.checkpoint = settings or CheckpointConfig()
        saver = Saver(RunPlan.of(engine.config), tmp_path, engine.groups)
        saver.save(engine, meta_of(engine, step, {"seed": "3"}, validation), tokenizer)
        saver.settle()
        return folder_of(tmp_path, step)

    return write
