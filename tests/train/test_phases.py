"""Runs of several phases: each with its own settings, stopped anywhere and gone on with, whole at its borders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import all_of, folder_of
from hybridtron.config.load import load_saved
from hybridtron.config.problems import ConfigError
from tests.train.conftest import Train

SIZES = "seq_len: 16, global_batch: 4, micro_batch: 2"
# four steps with a growing batch, four in bf16 with another window, four of the mixers alone with states passed on
CHAIN = (
    f"phases=[{{name: grow, tokens: 192, {SIZES}, lr: 1e-3, ramp: {{start: 2, step: 2, tokens: 64}}}},"
    f"{{name: narrow, tokens: 256, {SIZES}, lr_piece: carry_on, precision: {{name: bf16}}, layers: {{W: {{window: 4}}}}}},"
    f"{{name: mixers, tokens: 256, {SIZES}, lr_piece: decay, lr_to: 1e-4, moments: reset, states: {{mode: passing}},"
    "train: ['layers.*.mixer.*']}]"
)


def tensors(run: Path, step: int) -> dict[str, Tensor]:
    opened = Checkpoint.open(folder_of(run, step))
    return {key: opened.whole(key) for key in opened.shapes}


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(run)]


@pytest.fixture
def whole(train_small: Train, tmp_path: Path) -> Path:
    """The chain without a stop."""
    assert train_small(CHAIN, f"run.dir={tmp_path / 'whole'}", "checkpoint.keep=1") == 0
    return tmp_path / "whole"


def test_a_run_stopped_in_any_phase_or_between_two_ends_as_one_that_was_not(
    train_small: Train, tmp_path: Path, whole: Path
) -> None:
    run = tmp_path / "run"
    for step in (2, 4, 7, 8, 10, 12):
        assert train_small(CHAIN, f"run.max_steps={step}") == 0
    assert losses(run) == losses(whole)
    kept, expected = tensors(run, 12), tensors(whole, 12)
    assert kept.keys() == expected.keys()
    assert [key for key in kept if not torch.equal(kept[key], expected[key])] == []


def test_each_phase_does_what_it_says(whole: Path) -> None:
    lines = metrics_of(whole)
    assert [line["phase"] for line in lines] == ["grow"] * 4 + ["narrow"] * 4 + ["mixers"] * 4
    assert [line["tokens"] for line in lines] == [32, 64, *range(128, 705, 64)]
    assert lines[-1]["lr"] == pytest.approx(1e-4)
    assert [folder.name for folder in all_of(whole)] == [f"step-{step:08d}" for step in (4, 8, 12)]  # the borders
    at = {step: tensors(whole, step) for step in (4, 8, 12)}
    saved = {step: load_saved(folder_of(whole, step) / "config.yaml") for step in at}
    assert [saved[step].model.layers["W"]["window"] for step in at] == [8, 4, 8]
    assert [saved[step].precision.name.value for step in at] == ["fp32", "bf16", "fp32"]
    weights = {key for key in at[12] if key.startswith(("layers.", "embedding.", "norm."))}
    moved = {key for key in weights if not torch.equal(at[12][key], at[8].get(f"master.{key}", at[8][key]))}
    learning = {key for key in weights if key.startswith("layers.") and ".mixer." in key}
    assert moved == learning
    assert {key for key in at[12] if key.startswith("exp_avg.")} == {f"exp_avg.{key}" for key in learning}
