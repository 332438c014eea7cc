"""`hybridtron checkpoint average`: the mean of the weights of several checkpoints, as a new checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtron.architecture.adapters import AdaptersConfig
from hybridtron.checkpoint.average import shares_of, weight_shapes
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.cli import checkpoint
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import CheckpointConfig, ModelConfig
from hybridtron.engine.engine import Engine
from hybridtron.evaluate.loaded_model import whole_model
from hybridtron.parallel.groups import Groups
from hybridtron.train.start import initial_weights
from tests.checkpoint.conftest import Write, trained
from tests.conftest import random_batch, small_config, small_run
from tests.refusals import refusal

LOSSES = {1: 3.0, 2: 2.0, 3: 9.0}


def three(write: Write, engine: Engine) -> list[Path]:
    """Write the checkpoints of three steps."""
    folders = []
    for step in (1, 2, 3):
        engine.forward_backward([random_batch()])
        engine.step(1e-2)
        folders.append(write(engine, step, LOSSES[step], CheckpointConfig(keep=3)))
    return folders


def averaged(*arguments: object) -> Checkpoint:
    """Run the command; the last argument is the output folder."""
    *paths, output = arguments
    assert checkpoint.main(["average", *map(str, paths), "--output", str(output)]) == 0
    return Checkpoint.open(Path(str(output)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_average_is_the_mean_of_the_widest_weights(precision: str, alone: Groups, write: Write, tmp_path: Path) -> None:
    folders = three(write, trained(alone, precision))
    mean = averaged(*folders, tmp_path / "mean")
    sources = [Checkpoint.open(folder) for folder in folders]
    keys = weight_shapes(sources[0])
    assert keys
    for key in keys:
        expected = torch.stack([source.whole(source.widest(key)).double() for source in sources]).mean(0)
        widest = mean.whole(mean.widest(key))
        assert widest.dtype == torch.float32
        torch.testing.assert_close(widest, expected.float(), rtol=1e-6, atol=1e-9)
        assert mean.dtype(key) == sources[0].dtype(key)
        assert torch.equal(mean.whole(key), widest.to(mean.dtype(key)))
    has_masters = any(key.startswith("master.") for key in mean.shapes)
    assert has_masters == (precision == "bf16")
    assert mean.meta.step == 3
    assert mean.meta.validation is None
    assert list(mean.faults()) == []


def test_average_has_a_master_if_every_weight_is_unrounded(alone: Groups, tmp_path: Path) -> None:
    """A weight in fp32 needs no master of its own, so a run in fp32 must not remove those of a run in bf16."""
    fp32, bf16 = (_written(tmp_path / name, alone, small_config(), precision=name) for name in ("fp32", "bf16"))
    key = "embedding.weight"
    mean = averaged(fp32, bf16, tmp_path / "mean")
    sources = [Checkpoint.open(folder_of(run, 1)) for run in (fp32, bf16)]
    assert [source.widest(key) == key for source in sources] == [True, False]
    expected = sum(source.whole(source.widest(key)).double() for source in sources) / 2
    assert torch.equal(mean.whole(f"master.{key}"), expected.float())
    assert torch.equal(mean.whole(key), expected.float().bfloat16())
    wide = averaged(bf16, fp32, tmp_path / "wide")
    assert f"master.{key}" not in wide.shapes
    assert torch.equal(wide.whole(key), expected.float())


def test_weights_are_divided_by_their_sum(alone: Groups, write: Write, tmp_path: Path) -> None:
    first, second, third = three(write, trained(alone))
    output = tmp_path / "mean"
    arguments = ["average", str(first), str(second), str(third), "--output", str(output), "--weights", "1", "2", "1"]
    assert checkpoint.main(arguments) == 0
    a, b, c, mean = (Checkpoint.open(folder).whole("embedding.weight") for folder in (first, second, third, output))
    torch.testing.assert_close(mean, (a + 2 * b + c) / 4)
    assert not torch.allclose(mean, (a + b + c) / 3)
    assert shares_of([1e308, 1e308]) == [0.5, 0.5]


def test_a_run_names_its_newest_and_its_best_checkpoint(alone: Groups, write: Write, tmp_path: Path) -> None:
    _, best, newest = three(write, trained(alone))
    mean = averaged(f"{tmp_path}@best", tmp_path, tmp_path / "mean")
    expected = (Checkpoint.open(best).whole("norm.weight") + Checkpoint.open(newest).whole("norm.weight")) / 2
    torch.testing.assert_close(mean.whole("norm.weight"), expected)


def test_average_is_read_like_another_checkpoint(alone: Groups, write: Write, tmp_path: Path) -> None:
    engine = trained(alone)
    mean = averaged(*three(write, engine), tmp_path / "mean")
    assert torch.equal(whole_model(mean, mean.plan.arch).embedding.weight.cpu(), mean.whole("embedding.weight"))
    start = replace(engine.config, run=replace(engine.config.run, weights=str(mean.folder)))
    initial = initial_weights(start)
    assert initial is not None
    assert initial.folder == mean.folder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_average_of_moving_averages(
    precision: str, alone: Groups, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = small_run(precision=precision)
    engine = Engine(resolve(replace(plan, run=replace(plan.run, ema=0.5)))[0], alone)
    folders = three(write, engine)[1:]
    output = tmp_path / "mean"
    arguments = ["average", *map(str, folders), "--ema", "--output", str(output), "--weights", "1", "3"]
    assert checkpoint.main(arguments) == 0
    assert "mean of 2 moving averages" in capsys.readouterr().out
    mean = Checkpoint.open(output)
    first, second = map(Checkpoint.open, folders)
    for key in weight_shapes(first):
        expected = (first.whole(f"ema.{key}").double() + 3 * second.whole(f"ema.{key}").double()) / 4
        widest = mean.whole(mean.widest(key))
        torch.testing.assert_close(widest, expected.float(), rtol=1e-6, atol=1e-9)
        assert mean.dtype(key) == second.dtype(key)
        assert torch.equal(mean.whole(key), widest.to(mean.dtype(key)))
        assert (mean.widest(key) == key) == (second.widest(key) == key)
    assert not any(key.startswith("ema.") for key in mean.shapes)
    assert not torch.allclose(mean.whole("embedding.weight"), second.whole("embedding.weight"), rtol=1e-3)
    assert list(mean.faults()) == []


def test_checkpoints_without_a_moving_average_are_refused(alone: Groups, write: Write, tmp_path: Path) -> None:
    first, second, _ = three(write, trained(alone))
    error = refusal(checkpoint.main, ["average", first, second, "--ema", "--output", tmp_path / "mean"])
    assert error.code == "missing"
    assert not (tmp_path / "mean").exists()


def test_moving_averages_of_different_weights_are_refused(
    alone: Groups, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A phase averages only the weights that it trains; equal sets are averaged, and the other weights are counted."""
    plan = small_run()
    plan = replace(plan, run=replace(plan.run, ema=0.5))
    whole = Engine(resolve(plan)[0], alone)
    part = Engine(resolve(replace(plan, phases=[replace(plan.phases[0], train=["embedding.*"])]))[0], alone)
    folders = []
    for step, engine in enumerate((whole, part, part), start=1):
        engine.forward_backward([random_batch()])
        engine.step(1e-2)
        folders.append(write(engine, step, LOSSES[step], CheckpointConfig(keep=3)))
    output = tmp_path / "mean"
    for pair in (folders[:2], folders[1::-1]):
        error = refusal(checkpoint.main, ["average", *pair, "--ema", "--output", output])
        assert error.code == "mismatch"
        assert f"{folders[0]} has a moving average of layers" in str(error)
        assert f"{folders[1]} has none" in str(error)
    assert not output.exists()
    assert checkpoint.main(["average", *map(str, folders[1:]), "--ema", "--output", str(output)]) == 0
    count = len(weight_shapes(Checkpoint.open(output)))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"mean of 2 moving averages, {count} weights, 0 with fp32 masters, {count - 1} without a moving" in printed


def _written(folder: Path, groups: Groups, model: ModelConfig, tokenizer: str = "{}", precision: str = "fp32") -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer)
    engine = Engine(resolve(small_run(model, precision=precision))[0], groups)
    saver = Saver(RunPlan.of(engine.config), folder, groups)
    saver.save(engine, meta_of(engine, 1, {}), folder / "tokenizer.json")
    return folder


def test_checkpoints_that_do_not_fit_are_refused(alone: Groups, tmp_path: Path) -> None:
    model = small_config()
    output = tmp_path / "mean"
    run = _written(tmp_path / "run", alone, model)
    wide = replace(model, width=2 * model.width)
    adapters = AdaptersConfig(rank=2, weights=["layers.*.mixer.out.weight"])
    others = {
        "width": ("mismatch", _written(tmp_path / "wide", alone, wide)),
        "adapters": ("unsupported", _written(tmp_path / "adapted", alone, replace(model, adapters=adapters))),
        "tokenizer": ("mismatch", _written(tmp_path / "other", alone, model, '{"version": "2"}')),
    }
    for name, (code, other) in others.items():
        error = refusal(checkpoint.main, ["average", other, run, "--output", output])
        assert error.code == code
        assert name in str(error)
        assert str(other) in str(error)
    assert not output.exists()


def test_wrong_arguments_are_refused(alone: Groups, write: Write, tmp_path: Path) -> None:
    run = write(trained(alone))
    output = tmp_path / "mean"

    def code(*arguments: object) -> str:
        return refusal(checkpoint.main, ["average", *arguments, "--output", output]).code

    assert code(run) == "missing"
    assert code(run, tmp_path / "nowhere") == "no-file"
    assert code(run, f"{tmp_path}@best") == "no-file"  # it stores no held-out loss
    assert code(run, run, "--weights", 1) == "wrong-type"
    for factor in ("0", "nan", "inf"):
        assert code(run, run, "--weights", 1, factor) == "out-of-range"
    assert code(run, tmp_path) == "duplicate"  # the checkpoint is the run's newest
    output.mkdir()
    assert code(run, run) == "exists"


def test_a_damaged_source_leaves_no_output(
    alone: Groups, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = three(write, trained(alone))
    file = first / "model-00000.safetensors"
    stored = bytearray(file.read_bytes())
    stored[-1] ^= 1
    file.write_bytes(stored)
    assert checkpoint.main(["average", str(first), str(second), "--output", str(tmp_path / "mean")]) == 1
    assert "damaged" in capsys.readouterr().err
    assert not list(tmp_path.glob("*mean*"))
