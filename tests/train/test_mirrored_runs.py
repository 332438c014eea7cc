"""Checkpoints that a run offers to its mirror at a start and after a rollback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridtron.checkpoint import save
from hybridtron.engine.corruption import WEIGHTS
from hybridtron.engine.engine import Engine
from hybridtron.train.corruption import CheckFailed, CorruptionWatch
from tests.train.conftest import Train
from tests.train.faults import happening


class OfferedSteps:
    """A mirror that notes the steps of the checkpoints that it is offered."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def offer(self, folder: Path) -> None:
        assert folder.is_dir()
        self.steps.append(int(folder.name.removeprefix("step-")))

    def in_use(self) -> set[Path]:
        return set()

    def finish(self) -> None:
        pass


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> OfferedSteps:
    noting = OfferedSteps()
    monkeypatch.setattr(save, "mirror_of", lambda _: noting)
    return noting


@pytest.mark.slow
def test_start_from_a_local_checkpoint_mirrors_the_newest_in_the_folder_of_the_run(
    train_small: Train, mirror: OfferedSteps, tmp_path: Path
) -> None:
    settings = [
        "checkpoint.every=5",
        "checkpoint.local_every=3",
        f"checkpoint.local_dir={tmp_path / 'disk'}",
        "run.max_steps=12",
    ]
    with happening("raise", Engine, "forward_backward", 11), pytest.raises(RuntimeError, match="out of luck"):
        train_small(*settings)
    assert mirror.steps == [5, 10]
    mirror.steps.clear()
    with happening("raise", Engine, "forward_backward", 1), pytest.raises(RuntimeError, match="out of luck"):
        train_small(*settings)
    assert mirror.steps == [10]
    (tmp_path / "run" / "checkpoints" / "step-00000010").rename(tmp_path / "gone")
    mirror.steps.clear()
    assert train_small(*settings) == 0
    assert mirror.steps == [5, 10, 12]  # training continues from the local checkpoint of step 9


def test_rollback_mirrors_the_checkpoint_that_replaces_suspect_ones(
    train_small: Train, mirror: OfferedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []

    def fail_once(watch: CorruptionWatch, engine: Engine, step: int, saver: Any) -> None:
        if step == 12 and not failed:
            failed.append(step)
            raise CheckFailed(WEIGHTS, step, "weights differ", rank=-1, newest=6)

    monkeypatch.setattr(CorruptionWatch, "end_step", fail_once)
    assert train_small("checkpoint.every=5", "run.max_steps=13") == 0
    assert mirror.steps == [5, 10, 5, 10, 13]
