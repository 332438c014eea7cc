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
def test_the_laptop_recipe_learns_real_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


SIBLINGS = ("gla", "retnet", "gdn", "kda", "mamba3", "rwkv6")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", SIBLINGS)
def test_recipes_beside_laptop_learn(kind: str, tmp_path: Path) -> None:
    """Half of the recipe's tokens suffice to learn word order: word frequencies alone give a loss of 6.3."""
    settings = ["phases.0.tokens=400K", "run.sample_tokens=0", "run.eval_every=1000000", f"run.dir={tmp_path / 'run'}"]
    assert train.main([f"recipe={kind}_laptop", f"data.path={tmp_path / 'data'}", *settings]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["loss"] for line in lines[-20:]) / 20 < 5.7


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
