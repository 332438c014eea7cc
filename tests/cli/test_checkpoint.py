"""`hybridtron checkpoint`: list checkpoints, verify them, compare two, and rewrite one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.manifest import read
from hybridtron.checkpoint.rewrite import NOT_SET, differences, in_short
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.cli import checkpoint
from hybridtron.cli.main import main
from hybridtron.config.load import to_yaml
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from tests.conftest import random_batch, small_run
from tests.refusals import refusal


@pytest.fixture
def run(alone: Groups, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    engine = Engine(resolve(small_run())[0], alone)
    for step in (1, 2):
        engine.forward_backward([random_batch()])
        engine.step(1e-2)
        Saver(RunPlan.of(engine.config), folder, alone).save(
            engine, meta_of(engine, step, {}, 4.5 - step), folder / "tokenizer.json"
        )
    return folder


def reported(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    capsys.readouterr()
    assert main(["checkpoint", *map(str, arguments)]) == code
    return capsys.readouterr().out


def test_commands_list_and_verify_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = reported(capsys, 0, "list", run)
    assert "3.5000" in said
    assert "2.5000" in said
    assert "tensor 1, pipeline 1 x 1, data 1" in said
    assert reported(capsys, 0, "verify", run).count("no fault") == 2
    assert reported(capsys, 0, "verify", folder_of(run, 1)).count("no fault") == 1


@pytest.mark.parametrize("command", ["list", "verify"])
@pytest.mark.parametrize("kind", ["bit", "folder", "device", "missing"])
def test_a_wrong_pointer_is_reported(run: Path, command: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pointer = run / "checkpoints" / "latest"
    stored = bytearray(pointer.read_bytes())
    pointer.unlink()
    if kind == "bit":
        stored[-2] ^= 1
        pointer.write_bytes(stored)
    elif kind == "folder":
        pointer.mkdir()
    elif kind == "device":
        pointer.symlink_to("/dev/zero")
    assert "latest" in reported(capsys, 1, command, run)


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_renamed_checkpoint_is_reported(run: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(run, 1).rename(folder_of(run, 9))
    assert "step-00000009" in reported(capsys, 1, command, run)
    assert reported(capsys, 1, "verify", folder_of(run, 9))


def test_verify_names_the_broken_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder_of(run, 1) / "optimizer-00000.safetensors"
    stored = bytearray(file.read_bytes())
    stored[-1] ^= 1
    file.write_bytes(stored)
    said = reported(capsys, 1, "verify", run)
    assert "optimizer-00000.safetensors" in said
    assert "step-00000002: no fault" in said
    (folder_of(run, 2) / "manifest.json").unlink()
    said = reported(capsys, 1, "list", run)
    assert "broken" in said
    assert "latest" in said


def test_diff_shows_the_tensors_and_values_that_differ(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = folder_of(run, 1)
    assert reported(capsys, 0, "diff", first, first) == "the checkpoints do not differ\n"
    said = reported(capsys, 1, "diff", first, run)
    assert "exp_avg.norm.weight" in said
    assert "accepted_steps" in said
    (norms,) = (line.split(maxsplit=1)[1] for line in said.splitlines() if line.startswith(" norms"))
    assert re.fullmatch(r"1 values +2 values, the first 1 the same *", norms)
    assert max(map(len, said.splitlines())) <= 120


def test_settings_are_compared_by_their_dotted_keys(run: Path) -> None:
    """Report values exchanged between two phases, and each setting of a phase that exists on one side only."""
    config = small_run()
    slow = replace(config.phases[0], lr=1e-3)
    quick = replace(slow, lr=2e-3)
    phases = {1: [slow, quick], 2: [quick, slow, slow]}
    for step in phases:
        (folder_of(run, step) / "config.yaml").write_text(to_yaml(replace(config, phases=phases[step])))
    left, right = (Checkpoint(folder_of(run, step), read(folder_of(run, step))) for step in phases)
    reported = {
        difference.what.removeprefix("config.yaml "): (difference.left, difference.right)
        for difference in differences(left, right)
        if difference.what.startswith("config.yaml ")
    }
    third = {key: pair for key, pair in reported.items() if key.startswith("phases.2.")}
    assert third["phases.2.lr"] == (NOT_SET, "0.001")
    assert {before for before, _ in third.values()} == {NOT_SET}
    swapped = {"phases.0.lr": ("0.001", "0.002"), "phases.1.lr": ("0.002", "0.001")}
    assert reported == swapped | third
    back = {difference.what: (difference.left, difference.right) for difference in differences(right, left)}
    assert back["config.yaml phases.2.lr"] == ("0.001", NOT_SET)


def test_long_values_are_shortened() -> None:
    """Shorten lists with hundreds of norms, and long texts that differ in one place."""
    left = [float(at) for at in range(500)]
    right = [*left[:100], 100.25, *left[101:300], 301.5, *left[301:]]
    said = "500 values, 2 different by at most 1.5, first different at 100: 100.0 and 100.25"
    assert in_short(left, right) == ("500 values", said)
    assert in_short(left, left[:9]) == ("500 values", "9 values, the first 9 the same")
    assert in_short([[1]], [[2]])[1] == "1 values, 1 different, first different at 0: [1] and [2]"
    ours, theirs = in_short("a" * 300 + "x" + "b" * 300, "a" * 300 + "y" + "b" * 300)
    assert ours == theirs.replace("y", "x")
    assert ours.startswith("...aa")
    assert "axb" in ours
    assert len(ours) < 60
    assert in_short("short", None) == ("short", "None")


def test_resharded_checkpoint_holds_the_same_tensors(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = reported(capsys, 0, "reshard", run, tmp_path / "again", "--file-size", "20KB")
    assert "step 2" in said
    left = Checkpoint.open(folder_of(run, 2))
    right = Checkpoint.open(tmp_path / "again")
    assert left.shapes == right.shapes
    assert all(torch.equal(left.whole(key), right.whole(key)) for key in left.shapes)
    assert len(list((tmp_path / "again").glob("optimizer-*"))) > 3
    assert reported(capsys, 0, "diff", run, tmp_path / "again") == "the checkpoints do not differ\n"
    assert refusal(checkpoint.main, ["reshard", run, tmp_path / "again"]).code == "exists"


def test_a_path_without_a_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    assert refusal(checkpoint.main, ["list", tmp_path / "nowhere"]).code == "no-file"
    assert refusal(checkpoint.main, ["verify", tmp_path]).code == "no-file"
    error = refusal(checkpoint.main, ["reshard", run, tmp_path / "again", "--file-size", "lots"])
    assert error.code == "malformed"
    assert "--file-size lots" in str(error)


def test_names_are_not_cut(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names have a line each if the output is not a terminal, and are folded on a narrow terminal."""
    first = folder_of(run, 1)
    last = folder_of(run, 2)
    keys = [key for key in Checkpoint.open(first).shapes if key.startswith("exp_avg_sq.")]
    lines = reported(capsys, 1, "diff", first, last).splitlines()
    assert set(keys) <= {line.split()[0] for line in lines if line.split()}
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    narrow = reported(capsys, 1, "diff", first, last)
    assert "…" not in narrow
