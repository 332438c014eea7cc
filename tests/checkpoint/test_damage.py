"""A thousand kinds of damage to a checkpoint: each is found and named, and an older checkpoint is used."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtron.checkpoint import files
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import all_of, folder_of, newest, pointer_fault, valid_checkpoints
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.restore import PhaseBoundary, restore_newest, verify_weights
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import CheckpointConfig, StateMode, StatesConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.problems import ConfigError
from tests.checkpoint.conftest import Write, trained
from tests.conftest import random_batch, serving, small_run

TRIES = 1000


def all_tensors(engine: Engine) -> list[torch.Tensor]:
    return [block.data.clone() for name in ("model", "optimizer") for block in engine.blocks()[name]]


def passing(groups: Groups) -> Engine:
    """An engine that carries states from row to row, after two steps."""
    engine = Engine(resolve(replace(small_run(), states=StatesConfig(mode=StateMode.passing)))[0], groups)
    engine.start_phase(engine.phase, range(4))
    for step in range(2):
        engine.forward_backward(random_batch(rows=4).split(1), step)
        engine.step(1e-2)
    return engine


def damaged(path: Path, draw: random.Random) -> str:
    """Damage a file in a random way, and return the kind of damage."""
    stored = bytearray(path.read_bytes())
    kind = draw.choice(["bit", "bit", "bit", "cut", "empty", "missing", "longer"])
    if kind == "bit":
        stored[draw.randrange(len(stored))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del stored[draw.randrange(len(stored)) :]
    elif kind == "empty":
        stored.clear()
    elif kind == "longer":
        stored += b"\0" * draw.randint(1, 100)
    path.unlink()
    if kind != "missing":
        path.write_bytes(stored)
    return kind


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousand_faults_are_detected_before_a_weight_is_used(alone: Groups, write: Write, tmp_path: Path) -> None:
    """Faults in data, manifest and configuration are restored by reading, without the tool, before a weight is used."""
    engine = passing(alone)
    older = write(engine, 1)
    expected = all_tensors(engine)
    saved = write(passing(alone), 2)
    draw = random.Random(1)
    other = Engine(resolve(engine.config)[0], alone)
    names = sorted(path.name for path in saved.iterdir())
    for _ in range(TRIES):
        name = draw.choice(names)
        good = (saved / name).read_bytes()
        kind = damaged(saved / name, draw)
        broken = folder_of(tmp_path, 2).with_name("broken-step-00000002")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = restore_newest(valid_checkpoints(tmp_path), serving(other), tmp_path)
        if name in ("manifest.json", "config.yaml"):
            assert any(name in str(warning.message) for warning in caught)
        where = saved
        if not saved.exists():
            where = broken
        faults = faults_of(where)
        assert restored.folder == older, (name, kind)
        assert all(map(torch.equal, all_tensors(other), expected))
        assert any(name in fault for fault in faults), (name, kind, faults)
        (where / name).write_bytes(good)
        if where != saved:
            where.rename(saved)
    assert not list(Checkpoint.open(saved).faults())


def faults_of(folder: Path) -> list[str]:
    try:
        return list(Checkpoint.open(folder).faults())
    except BrokenCheckpoint as error:
        return [str(error)]


@pytest.mark.parametrize("kind", ["bit", "cut", "empty", "missing"])
def test_wrong_pointer_is_reported_and_not_followed(alone: Groups, write: Write, tmp_path: Path, kind: str) -> None:
    engine = trained(alone)
    for step in (1, 2):
        write(engine, step)
    pointer = tmp_path / "checkpoints" / "latest"
    stored = bytearray(pointer.read_bytes())
    if kind == "bit":
        stored[3] ^= 4
    pointer.unlink()
    if kind != "missing":
        pointer.write_bytes({"bit": stored, "cut": stored[:20], "empty": b""}[kind])
    assert pointer_fault(tmp_path) is not None
    with pytest.warns(UserWarning, match="latest"):
        checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.meta.step == 2


def test_change_between_verification_and_loading_is_detected(
    alone: Groups, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verified bytes are the loaded bytes: a file that changes after a full check is refused."""
    engine = trained(alone)
    older = write(engine, 1)
    saved = write(trained(alone, steps=3), 2)
    assert not list(Checkpoint.open(saved).faults())
    read = files._read
    done = []

    def changing(path: Path, start: int, count: int, expected: str, size: int) -> bytearray:
        if path.name.startswith("optimizer") and not done and path.parent == saved:
            done.append(path)
            stored = bytearray(path.read_bytes())
            stored[-1] ^= 1
            path.write_bytes(stored)
        return read(path, start, count, expected, size)

    monkeypatch.setattr(files, "_read", changing)
    assert (
        restore_newest(valid_checkpoints(tmp_path), serving(Engine(resolve(engine.config)[0], alone)), tmp_path).folder
        == older
    )
    assert done


def test_run_without_a_valid_checkpoint_is_refused(alone: Groups, write: Write, tmp_path: Path) -> None:
    engine = trained(alone)
    file = write(engine, 1) / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BrokenCheckpoint, match=r"model-00000\.safetensors") as refused:
        restore_newest(valid_checkpoints(tmp_path), serving(Engine(resolve(engine.config)[0], alone)), tmp_path)
    assert refused.value.code == "unreadable"
    assert (tmp_path / "checkpoints" / "broken-step-00000001").is_dir()


def test_a_half_copied_checkpoint_is_archived_beside_another(alone: Groups, write: Write, tmp_path: Path) -> None:
    engine = trained(alone)
    for number in ("", "-2"):
        saved = write(engine, 1)
        (saved / "model-00000.safetensors").unlink()
        with pytest.raises(BrokenCheckpoint):
            restore_newest(valid_checkpoints(tmp_path), serving(Engine(resolve(engine.config)[0], alone)), tmp_path)
        assert (tmp_path / "checkpoints" / f"broken-step-00000001{number}").is_dir()
    shutil.rmtree(tmp_path / "checkpoints")


def test_newer_checkpoint_with_a_damaged_manifest_is_archived(
    alone: Groups, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start has skipped it; the next checkpoint, of an earlier step, is written all the same."""
    engine = trained(alone)
    for step in (1, 9):
        write(engine, step)
    (folder_of(tmp_path, 9) / "manifest.json").write_text("{}")
    saved = write(engine, 2, settings=CheckpointConfig(keep=1))
    assert [path.name for path in all_of(tmp_path)] == [saved.name]
    assert (tmp_path / "checkpoints" / "broken-step-00000009").is_dir()
    assert "broken-step-00000009" in capsys.readouterr().err
    assert pointer_fault(tmp_path) is None


def test_next_save_removes_the_remains_of_a_failed_one(alone: Groups, write: Write, tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".step-00000001.temporary"
    left.mkdir(parents=True)
    (left / "model-00000.safetensors").write_bytes(b"half of it")
    saved = write(trained(alone), 2)
    assert {path.name for path in saved.parent.iterdir()} == {saved.name, "latest"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("manifest.json", "/dev/zero"),
        ("manifest.json", "pipe"),
        ("config.yaml", "/dev/zero"),
        ("tokenizer.json", "."),
        ("model-00000.safetensors", "pipe"),
    ],
)
def test_link_to_a_device_or_pipe_is_not_read(
    alone: Groups, write: Write, tmp_path: Path, name: str, target: str
) -> None:
    engine = trained(alone)
    older = write(engine, 1)
    saved = write(engine, 2)
    os.mkfifo(saved / "pipe")
    (saved / name).unlink()
    (saved / name).symlink_to(target)
    assert any(name in fault for fault in faults_of(saved))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = restore_newest(
            valid_checkpoints(tmp_path), serving(Engine(resolve(engine.config)[0], alone)), tmp_path
        )
    assert restored.folder == older


def test_endless_manifest_is_not_read(alone: Groups, write: Write) -> None:
    saved = write(trained(alone))
    os.truncate(saved / "manifest.json", 2**40)  # takes no place on the disk
    assert len(faults_of(saved)) == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_renamed_checkpoint_is_archived(
    alone: Groups, write: Write, tmp_path: Path, swapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under another step's name a run would resume from it at each start, forever."""
    engine = trained(alone)
    first, second, third = (write(engine, step, settings=CheckpointConfig(keep=3)) for step in (1, 2, 3))
    if swapped:
        second.rename(tmp_path / "second")
        third.rename(second)
        (tmp_path / "second").rename(third)
        wrong = {second.name, third.name}
        expected = first
    else:
        wrong = {"step-00000099"}
        expected = third
        second.rename(second.with_name("step-00000099"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = restore_newest(
            valid_checkpoints(tmp_path), serving(Engine(resolve(engine.config)[0], alone)), tmp_path
        )
    assert restored.folder == expected
    assert {path.name for path in expected.parent.glob("broken-*")} == {f"broken-{name}" for name in wrong}
    assert all(name in capsys.readouterr().err for name in list(wrong)[:1])
    assert all_of(tmp_path)[-1] == expected


@pytest.mark.parametrize("kind", ["folder", "device"])
def test_pointer_that_is_no_file_is_replaced_by_the_next_save(
    alone: Groups, write: Write, tmp_path: Path, kind: str
) -> None:
    engine = trained(alone)
    for step in (1, 2):
        write(engine, step)
    pointer = tmp_path / "checkpoints" / "latest"
    pointer.unlink()
    if kind == "folder":
        pointer.mkdir()
    else:
        pointer.symlink_to("/dev/zero")
    with pytest.warns(UserWarning, match="latest"):
        checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.meta.step == 2
    write(engine, 3)
    assert pointer_fault(tmp_path) is None


@pytest.mark.parametrize("key", ["run.resume", "run.weights", "phases.1.init_from"])
def test_damaged_checkpoint_of_another_run_is_reported_by_its_key(
    alone: Groups, write: Write, tmp_path: Path, key: str
) -> None:
    engine = trained(alone)
    other = write(engine, 1)
    other = other.rename(tmp_path / "other")
    file = other / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    intact = Checkpoint.open(write(engine, 2))
    damaged = Checkpoint.open(other)
    boundary = PhaseBoundary(damaged, moments=False, key=key)
    read = {
        "run.resume": lambda: restore_newest([damaged], serving(engine), tmp_path),
        "run.weights": lambda: verify_weights(damaged, alone, key),
        "phases.1.init_from": lambda: restore_newest([intact], lambda _: (engine, boundary), tmp_path),
    }
    with pytest.raises(ConfigError) as raised:
        read[key]()
    assert [(problem.key, problem.code) for problem in raised.value.problems] == [(key, "unreadable")]
    assert str(other) in str(raised.value)
    assert intact.folder.is_dir()
    assert other.is_dir()
