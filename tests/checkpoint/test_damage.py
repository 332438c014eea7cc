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
from hybridtron.checkpoint.restore import Border, check_given, restore_newest
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
    engine = Engine(replace(small_run(), states=StatesConfig(mode=StateMode.passing)), groups)
    engine.start_phase(0, range(4))
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
def test_a_thousand_faults_are_found(alone: Groups, write: Write, tmp_path: Path) -> None:
    """Faults in data, manifest and configuration are found by reading, without the tool, before a weight is used."""
    engine = passing(alone)
    older = write(engine, 1)
    expected = all_tensors(engine)
    saved = write(passing(alone), 2)
    draw = random.Random(1)
    other = Engine(engine.config, alone)
    names = sorted(path.name for path in saved.iterdir())
    for _ in range(TRIES):
        name = draw.choice(names)
        good = (saved / name).read_bytes()
        kind = damaged(saved / name, draw)
        broken = folder_of(tmp_path, 2).with_name("broken-step-00000002")
        with pytest.warns(UserWarning, match=name) if name in ("manifest.json", "config.yaml") else no_matter():
            found = restore_newest(valid_checkpoints(tmp_path), serving(other), tmp_path)
        where = saved if saved.exists() else broken
        faults = faults_of(where)
        assert found.folder == older, (name, kind)
        assert all(map(torch.equal, all_tensors(other), expected))
        assert any(name in fault for fault in faults), (name, kind, faults)
        (where / name).write_bytes(good)
        if where != saved:
            where.rename(saved)
    assert not list(Checkpoint.open(saved).faults())


class no_matter:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def faults_of(folder: Path) -> list[str]:
    try:
        return list(Checkpoint.open(folder).faults())
    except BrokenCheckpoint as error:
        return [str(error)]


@pytest.mark.parametrize("kind", ["bit", "cut", "empty", "missing"])
def test_a_pointer_that_is_wrong_is_reported_and_not_followed(
    alone: Groups, write: Write, tmp_path: Path, kind: str
) -> None:
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
        found = newest(tmp_path)
    assert found is not None
    assert found.meta.step == 2


def test_what_changes_between_verification_and_loading_is_found(
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
    assert restore_newest(valid_checkpoints(tmp_path), serving(Engine(engine.config, alone)), tmp_path).folder == older
    assert done


def test_when_none_is_whole_it_is_said(alone: Groups, write: Write, tmp_path: Path) -> None:
    engine = trained(alone)
    file = write(engine, 1) / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BrokenCheckpoint, match=r"no checkpoint is whole; .*model-00000\.safetensors has"):
        restore_newest(valid_checkpoints(tmp_path), serving(Engine(engine.config, alone)), tmp_path)
    assert (tmp_path / "checkpoints" / "broken-step-00000001").is_dir()


def test_a_half_copied_checkpoint_is_archived_beside_another(alone: Groups, write: Write, tmp_path: Path) -> None:
    engine = trained(alone)
    for number in ("", "-2"):
        saved = write(engine, 1)
        (saved / "model-00000.safetensors").unlink()
        with pytest.raises(BrokenCheckpoint):
            restore_newest(valid_checkpoints(tmp_path), serving(Engine(engine.config, alone)), tmp_path)
        assert (tmp_path / "checkpoints" / f"broken-step-00000001{number}").is_dir()
    shutil.rmtree(tmp_path / "checkpoints")


def test_a_newer_checkpoint_without_a_sound_manifest_is_none_to_keep(
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


def test_what_a_failed_save_left_behind_goes_with_the_next(alone: Groups, write: Write, tmp_path: Path) -> None:
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
def test_a_link_to_what_is_no_file_is_refused_unread(
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
        found = restore_newest(valid_checkpoints(tmp_path), serving(Engine(engine.config, alone)), tmp_path)
    assert found.folder == older


def test_a_manifest_without_end_is_not_read(alone: Groups, write: Write) -> None:
    saved = write(trained(alone))
    os.truncate(saved / "manifest.json", 2**40)  # takes no place on the disk
    assert len(faults_of(saved)) == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_a_renamed_checkpoint_is_moved_out_of_the_way(
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
        found = restore_newest(valid_checkpoints(tmp_path), serving(Engine(engine.config, alone)), tmp_path)
    assert found.folder == expected
    assert {path.name for path in expected.parent.glob("broken-*")} == {f"broken-{name}" for name in wrong}
    assert all(name in capsys.readouterr().err for name in list(wrong)[:1])
    assert all_of(tmp_path)[-1] == expected


@pytest.mark.parametrize("kind", ["folder", "device"])
def test_a_pointer_that_is_no_file_is_replaced_by_the_next_save(
    alone: Groups, write: Write, tmp_path: Path, kind: str
) -> None:
    engine = trained(alone)
    for step in (1, 2):
        write(engine, step)
    pointer = tmp_path / "checkpoints" / "latest"
    pointer.unlink()
    pointer.mkdir() if kind == "folder" else pointer.symlink_to("/dev/zero")
    with pytest.warns(UserWarning, match="latest"):
        found = newest(tmp_path)
    assert found is not None
    assert found.meta.step == 2
    write(engine, 3)
    assert pointer_fault(tmp_path) is None


@pytest.mark.parametrize("key", ["run.resume", "run.weights", "phases.1.init_from"])
def test_a_damaged_checkpoint_of_another_run_is_left_as_it_is_and_named_by_its_key(
    alone: Groups, write: Write, tmp_path: Path, key: str
) -> None:
    engine = trained(alone)
    other = write(engine, 1)
    other = other.rename(tmp_path / "other")
    file = other / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    own, given = Checkpoint.open(write(engine, 2)), Checkpoint.open(other)
    border = Border(given, moments=False, key=key)
    read = {
        "run.resume": lambda: restore_newest([given], serving(engine), tmp_path),
        "run.weights": lambda: check_given(given, alone, key),
        "phases.1.init_from": lambda: restore_newest([own], lambda _: (engine, border), tmp_path),
    }
    with pytest.raises(ConfigError) as raised:
        read[key]()
    assert [problem.key for problem in raised.value.problems] == [key]
    assert str(other) in str(raised.value)
    assert own.folder.is_dir()
    assert other.is_dir()
