"""Runs of several phases: each with its own settings, stopped anywhere and resumed, whole at its borders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import all_of, folder_of
from hybridtron.cli import train
from hybridtron.config.load import load_saved
from tests.train.conftest import Train, small_run_arguments

SIZES = "seq_len: 16, global_batch: 4, micro_batch: 2"
GROW = f"{{name: grow, tokens: 192, {SIZES}, lr: 1e-3, ramp: {{start: 2, step: 2, tokens: 64}}}}"
NARROW = (
    f"{{name: narrow, tokens: 256, {SIZES}, lr_piece: carry_on, precision: {{name: bf16}},"
    "layers: {W: {window: 4}}}"
)
MIXERS = (
    f"{{name: mixers, tokens: 256, {SIZES}, lr_piece: decay, lr_to: 1e-4, moments: reset, states: {{mode: passing}},"
    "train: ['layers.*.mixer.*']}"
)
CHAIN = f"phases=[{GROW},{NARROW},{MIXERS}]"  # of four steps each


def tensors(run: Path, step: int) -> dict[str, Tensor]:
    opened = Checkpoint.open(folder_of(run, step))
    return {key: opened.whole(key) for key in opened.shapes}


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(run)]


@pytest.fixture(scope="module")
def whole(counting_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain without a stop."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train.main([*small_run_arguments(counting_folder, run), CHAIN, "checkpoint.keep=1"]) == 0
    return run


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(7, 8, 12), pytest.param((2, 4, 5, 8, 9, 11, 12), marks=pytest.mark.slow)])
def test_runs_interrupted_in_any_phase_end_like_uninterrupted_ones(
    train_small: Train, tmp_path: Path, whole: Path, stops: tuple[int, ...]
) -> None:
    run = tmp_path / "run"
    for step in stops:
        assert train_small(CHAIN, f"run.max_steps={step}") == 0
    assert losses(run) == losses(whole)
    kept = tensors(run, 12)
    expected = tensors(whole, 12)
    assert kept.keys() == expected.keys()
    assert [key for key in kept if not torch.equal(kept[key], expected[key])] == []


def test_phases_apply_their_settings(whole: Path) -> None:
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


@pytest.mark.slow
def test_broken_checkpoints_fall_back_to_the_phase_before(train_small: Train, tmp_path: Path, whole: Path) -> None:
    assert train_small(CHAIN, "run.max_steps=9", "checkpoint.every=1", "checkpoint.keep=1") == 0
    for damaged in all_of(tmp_path / "run")[1:]:  # the border of step 8 and the one of step 9
        path = next(damaged.glob("model-*"))
        path.write_bytes(path.read_bytes()[:-4] + b"gone")
    assert train_small(CHAIN) == 0
    assert losses(tmp_path / "run") == losses(whole)


@pytest.mark.slow
def test_a_phase_starts_from_another_run_and_exports_at_its_end(
    train_small: Train, tmp_path: Path, whole: Path
) -> None:
    trained_here = f"{{name: own, tokens: 64, {SIZES}, lr: 1e-3}}"
    from_weights = f"{{name: other, tokens: 64, {SIZES}, lr: 1e-30, init_from: {whole}, export: custom}}"
    assert train_small(f"phases=[{trained_here},{from_weights}]") == 0
    run = tmp_path / "run"
    ours = tensors(run, 2)
    theirs = tensors(whole, 12)
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-20) for key in ours if key.startswith("layers."))
    assert (run / "export" / "other" / "modeling_hybridtron.py").exists()
    shutil.rmtree(run / "export")
    assert train_small(f"phases=[{trained_here},{from_weights}]") == 0  # nothing to train, but the export is not there
    assert (run / "export" / "other" / "config.json").exists()


def test_problems_of_later_phases_are_reported_before_the_start(
    train_small: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = f"{{name: a, tokens: 256, {SIZES}, lr: 1e-3}}"
    wrong = (
        f"{{name: b, tokens: 256, {SIZES}, lr: 1e-3, lr_piece: decay, data: {{path: {tmp_path}/none}}}}",
        f"{{name: c, tokens: 256, {SIZES}, lr: 1e-3, layers: {{W: {{heads: 3}}}}, init_from: nowhere}}",
        f"{{name: d, tokens: 256, {SIZES}, lr: 1e-3, ramp: {{start: 3, step: 2, tokens: 64}},"
        "states: {mode: passing}}",
        f"{{name: e, tokens: 1M, {SIZES}, lr: 1e-3, precision: {{name: fp8_block}},train: ['mixer']}}",
    )
    assert train_small(f"phases=[{first},{','.join(wrong)}]", "data.epochs=1") == 2
    output = capsys.readouterr().err
    for words in (
        "phases.1.lr ", "phases.1.lr_to ", "phases.2.layers.W.heads", "phases.2.init_from",
        "phases.3.ramp.step", "phases.3.ramp.start", "phases.3.ramp ", "phases.4.precision.name", "phases.4.train",
        "phases.1.data.path", "data.epochs",
    ):  # fmt: skip
        assert words in output, words


def test_the_plan_prints_the_changes_of_each_phase(
    train_small: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert train_small(CHAIN, "run.plan=true", "cluster=h100", "parallel.tensor=2", "parallel.pipeline=2") == 0
    output = capsys.readouterr().out
    for words in (
        "1 to 4", "5 to 8", "9 to 12", "2 to 4", "0.0185", "GPU-hours on h100", "grow", "narrow", "mixers",
        "precision.name: fp32 -> bf16", "window=8 -> kind=attention heads=4 window=4", "trains layers.*.mixer.*",
        "starts without the optimizer's moments", "states.mode: zero -> passing", "learning rate: decay to 0.0001",
    ):  # fmt: skip
        assert words in output, words
    assert not (tmp_path / "run").exists()
