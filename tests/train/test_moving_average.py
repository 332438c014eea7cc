"""Runs with `run.ema`: the commands that read the average, a resume, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridtron.checkpoint.average import weight_shapes
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.moving_average import moving_average
from hybridtron.cli import convert, evaluate, generate
from hybridtron.cli.arguments import newest_checkpoint
from hybridtron.config.export_class import RECORD
from hybridtron.evaluate.loaded_model import load_model
from hybridtron.interop.reader import Weights
from tests.refusals import refusal
from tests.train.conftest import Refused, Train

AVERAGING = ("run.ema=0.8", "precision=bf16")


def averages(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    prefix = "ema."
    return {key.removeprefix(prefix): checkpoint.whole(key) for key in checkpoint.shapes if key.startswith(prefix)}


@pytest.fixture
def run(train_small: Train, tmp_path: Path) -> Path:
    assert train_small(*AVERAGING, "run.max_steps=4") == 0
    return tmp_path / "run"


def test_commands_read_the_average(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = newest_checkpoint(run)
    stored = averages(Checkpoint.open(folder))
    raw = Checkpoint.open(folder)
    assert stored.keys() == weight_shapes(raw).keys()
    assert not torch.equal(stored["embedding.weight"], raw.whole("master.embedding.weight"))
    output = tmp_path / "average"
    asked = ["export", str(run), "--ema", "--output", str(output), "--target", "custom"]
    assert convert.main([*asked, "--verify", "none"]) == 0
    assert "step 4, moving average" in capsys.readouterr().out
    assert json.loads((output / RECORD).read_text())["weights"] == "moving average"
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    assert convert.main(["import", str(output), "--output", str(tmp_path / "back"), "--verify", "none"]) == 0
    back = Checkpoint.open(tmp_path / "back")
    for key, average in stored.items():
        assert torch.equal(back.whole(key), average.to(back.dtype(key))), key
        assert back.dtype(key) == raw.dtype(key), key
    wide = tmp_path / "wide"
    assert convert.main([*asked[:-3], str(wide), "--target", "custom", "--verify", "none", "--dtype", "float32"]) == 0
    weights = Weights(wide)
    assert any(torch.equal(weights.read(name), stored["embedding.weight"]) for name in weights.shapes)
    with load_model(folder, averaged=True) as model:
        assert model.averaged
        assert model.read.model is not None
        loaded = model.read.model.embedding.weight.detach().cpu()
    assert torch.equal(loaded, stored["embedding.weight"].bfloat16())
    assert generate.main([str(run), "--ema", "--prompt", "1 2", "--tokens", "2"]) == 0
    assert evaluate.main([str(run), "--ema", "--instruments", "states", "--length", "32", "--rows", "1"]) == 0
    results = run / "evaluation" / f"{folder.name}-ema" / "samples.jsonl"
    assert json.loads(results.read_text().splitlines()[0])["about"]["weights"] == "moving average"


@pytest.mark.slow
def test_export_of_the_average_is_proven(run: Path, tmp_path: Path) -> None:
    """The proof compares with the average: it accepts the average's export, and refuses that of the weights."""
    output = tmp_path / "average"
    assert convert.main(["export", str(run), "--ema", "--output", str(output)]) == 0
    assert convert.main(["verify", str(run), "--ema", "--output", str(output)]) == 0
    assert convert.main(["verify", str(run), "--output", str(output)]) == 1


def test_resumed_run_continues_the_average_with_the_same_bits(train_small: Train, tmp_path: Path) -> None:
    ended = []
    for stops in ((8,), (5, 8)):
        for step in stops:
            assert train_small(*AVERAGING, f"run.max_steps={step}", f"run.dir={tmp_path / str(len(stops))}") == 0
        ended.append(averages(Checkpoint.open(folder_of(tmp_path / str(len(stops)), 8))))
    whole, resumed = ended
    assert whole
    assert all(torch.equal(average, resumed[key]) for key, average in whole.items())


@pytest.mark.slow
def test_average_can_not_be_added_or_removed(train_small: Train, refused: Refused, tmp_path: Path) -> None:
    for number, (first, then) in enumerate((("run.ema=0.9", "run.ema=null"), ("run.ema=null", "run.ema=0.9"))):
        folder = f"run.dir={tmp_path / str(number)}"
        assert train_small(first, folder, "run.max_steps=2") == 0
        problem = refused(then, folder, "run.max_steps=4")["run.ema"]
        assert problem.code == "changed"
        assert "null" in problem.message
        assert "0.9" in problem.message
    assert train_small("run.ema=0.5", f"run.dir={tmp_path / '0'}", "run.max_steps=3") == 0  # another decay is accepted


def test_correction_of_a_router_is_read_as_it_is(train_small: Train, tmp_path: Path) -> None:
    experts = "{kind: moe, experts: 4, top_k: 2, hidden: 16, balance: bias, speed: 0.5}"
    assert train_small(*AVERAGING, f"model.layers.-={experts}", "run.max_steps=3") == 0
    checkpoint = Checkpoint.open(newest_checkpoint(tmp_path / "run"))
    averaged = moving_average(checkpoint)
    corrections = [key for key in weight_shapes(checkpoint) if key.endswith("mixer.correction")]
    routers = [key for key in weight_shapes(checkpoint) if key.endswith("mixer.router")]
    assert corrections
    assert not set(corrections) & set(averages(checkpoint))
    for key in corrections:
        assert torch.equal(averaged.whole(key), checkpoint.whole(key))
        assert checkpoint.whole(key).any()
    for key in routers:
        assert not torch.equal(averaged.whole(key), checkpoint.whole(key))


@pytest.mark.parametrize("decay", ["0", "1", "-0.5", "nan"])
def test_decays_outside_zero_and_one_are_refused(decay: str, refused: Refused) -> None:
    assert refused(f"run.ema={decay}")["run.ema"].code == "out-of-range"


def test_checkpoint_without_an_average_is_refused(train_small: Train, tmp_path: Path) -> None:
    assert train_small("run.max_steps=2") == 0
    run = tmp_path / "run"
    for command, more in ((generate.main, ["--tokens", "2"]), (evaluate.main, ["--rows", "1"])):
        error = refusal(command, [run, "--ema", *more])
        assert error.code == "missing"
        assert "run.ema" in str(error)
    assert convert.main(["export", str(run), "--ema", "--output", str(tmp_path / "average")]) == 2
    assert not (tmp_path / "average").exists()


def test_adapters_are_averaged_and_then_merged(train_small: Train, tmp_path: Path) -> None:
    adapters = "phases.0.adapters={rank: 2, weights: [layers.*.mixer.out.weight]}"
    assert train_small(*AVERAGING, adapters, "run.max_steps=4") == 0
    checkpoint = Checkpoint.open(newest_checkpoint(tmp_path / "run"))
    stored = averages(checkpoint)
    view = moving_average(checkpoint)
    assert stored
    assert all("adapter" in key for key in stored)
    for key, average in stored.items():
        assert torch.equal(view.whole(key), average)
        assert torch.equal(view.whole(view.widest(key)), average)
    frozen = next(key for key in checkpoint.shapes if key == "embedding.weight")
    assert torch.equal(view.whole(frozen), checkpoint.whole(frozen))
