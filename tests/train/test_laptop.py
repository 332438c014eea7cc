"""The promise of `make train`: the laptop recipe learns real text within minutes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.cli import train
from tests.train.conftest import Train


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_learns_real_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([f"run.dir={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    uniform = math.log(2048)
    assert lines[0]["loss"] == pytest.approx(uniform, rel=0.05)
    assert lines[-1]["loss"] < 0.6 * uniform
    assert max(lines[-1]["validation"].values()) < 0.6 * uniform
    assert set(lines[-1]["validation_by_source"]) == {"code", "text"}
    lately = sum(line["loss"] for line in lines[-40:]) / 40
    assert lines[-1]["validation"]["1x"] == pytest.approx(lately, abs=0.15)  # held-out text is no other kind of text
    said = capsys.readouterr().out
    assert str(checkpoints.all_of(tmp_path / "run")[-1]) in said
    assert said.rstrip().splitlines()[-1].strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_training_gives_the_same_losses(train_small: Train, tmp_path: Path) -> None:
    assert train_small("run.max_steps=3") == 0
    (tmp_path / "run").rename(tmp_path / "plain")
    assert train_small("run.max_steps=3", "run.compile=true") == 0
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "run")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
