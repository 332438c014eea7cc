"""A checkpoint's contents are restored bit for bit; retention of checkpoints, and refusals."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridtron.checkpoint import async_copy, manifest
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import (
    apply_retention,
    archive_later,
    best,
    folder_of,
    newest,
    pointer_fault,
    valid_checkpoints,
)
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.restore import restore_newest
from hybridtron.checkpoint.save import SaveError, Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import CheckpointConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.storage.digest import digest_of
from tests.checkpoint.conftest import Write, trained
from tests.conftest import random_batch, serving
from tests.slow import slow_except


def all_blocks(engine: Engine) -> list[torch.Tensor]:
    return [block.data for of_file in engine.blocks().values() for block in of_file]


@pytest.mark.parametrize("asynchronous", slow_except([False, True], True))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_delayed"])
def test_checkpoint_restores_the_engine_bit_for_bit(
    alone: Groups, write: Write, tmp_path: Path, precision: str, asynchronous: bool
) -> None:
    engine = trained(alone, precision)
    saved = write(engine, settings=CheckpointConfig(asynchronous=asynchronous))
    drawn = torch.rand(3)
    other = Engine(resolve(engine.config)[0], alone)
    checkpoint = restore_newest(valid_checkpoints(tmp_path), serving(other), tmp_path)
    assert checkpoint.folder == saved
    assert torch.equal(torch.rand(3), drawn)
    assert (checkpoint.meta.step, checkpoint.meta.accepted_steps, checkpoint.meta.data) == (7, 2, {"seed": "3"})
    assert all(map(torch.equal, all_blocks(engine), all_blocks(other)))
    assert checkpoint.config == engine.config
    assert not list(checkpoint.faults())
    batch = random_batch()
    for continued in (engine, other):
        continued.forward_backward([batch])
        continued.step(1e-2)
    assert all(map(torch.equal, all_blocks(engine), all_blocks(other)))


def test_files_are_safetensors_with_the_parts_of_fused_projections(alone: Groups, write: Write) -> None:
    engine = trained(alone)
    stored = load_file(write(engine) / "model-00000.safetensors")
    assert "layers.0.mixer.in_proj.weight" not in stored
    in_proj = dict(engine.weights())["layers.0.mixer.in_proj.weight"]
    assert torch.equal(stored["layers.0.mixer.in_proj.weight.z"], in_proj[64:])
    assert {"layers.2.mixer.kv.weight.k", "layers.1.mixer.gate_up.weight.up"} <= set(stored)


def test_asynchronous_checkpoint_holds_the_weights_of_its_own_step(
    alone: Groups, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training changes every weight before the first byte is written."""
    engine = trained(alone)
    engine.config.checkpoint = CheckpointConfig(asynchronous=True)
    expected = [tensor.clone() for tensor in all_blocks(engine)]
    trained_on = threading.Event()
    real_write = Saver._write

    def late(saver: Saver, *arguments: object) -> None:
        trained_on.wait(30)
        real_write(saver, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Saver, "_write", late)
    saver = Saver(RunPlan.of(engine.config), tmp_path, alone)
    saver.save(engine, meta_of(engine, 1, {}), tmp_path / "tokenizer.json")
    engine.forward_backward([random_batch()])
    engine.step(1.0)
    assert not any(map(torch.equal, all_blocks(engine), expected))
    trained_on.set()
    saver.settle()
    other = Engine(resolve(engine.config)[0], alone)
    restore_newest(valid_checkpoints(tmp_path), serving(other), tmp_path)
    assert all(map(torch.equal, all_blocks(other), expected))


def test_update_waits_until_an_asynchronous_checkpoint_has_copied_the_weights(
    alone: Groups, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying ends after the next forward and backward pass."""
    engine = trained(alone)
    engine.config.checkpoint = CheckpointConfig(asynchronous=True)
    expected = [tensor.clone() for tensor in all_blocks(engine)]
    passed = threading.Event()
    real_copy = async_copy.copy

    def late(source: torch.Tensor, target: torch.Tensor) -> None:
        if source.dtype == torch.float32:
            assert passed.wait(30)
        real_copy(source, target)

    monkeypatch.setattr(async_copy, "copy", late)
    saver = Saver(RunPlan.of(engine.config), tmp_path, alone)
    saver.save(engine, meta_of(engine, 1, {}), tmp_path / "tokenizer.json")
    engine.forward_backward([random_batch()])
    assert all(map(torch.equal, all_blocks(engine), expected))
    threading.Timer(0.2, passed.set).start()
    engine.step(1.0)
    assert passed.is_set()
    saver.settle()
    other = Engine(resolve(engine.config)[0], alone)
    restore_newest(valid_checkpoints(tmp_path), serving(other), tmp_path)
    assert all(map(torch.equal, all_blocks(other), expected))


def kept(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


def test_retention_keeps_newest_best_and_every_nth(alone: Groups, write: Write, tmp_path: Path) -> None:
    engine = trained(alone)
    settings = CheckpointConfig(keep=2, keep_every="4", keep_best=True)
    losses = {1: 3.0, 2: 1.0, 4: 2.0, 6: 2.5, 7: None, 8: 2.0, 9: 2.0, 10: 2.0}
    for step, loss in losses.items():
        write(engine, step, loss, settings)
    assert kept(tmp_path) == [2, 4, 8, 9, 10]
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.meta.step == 10
    assert pointer_fault(tmp_path) is None


def test_best_checkpoint_is_one_that_can_be_opened(alone: Groups, write: Write, tmp_path: Path) -> None:
    engine = trained(alone)
    settings = CheckpointConfig(keep=1, keep_best=True)
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        write(engine, step, loss, CheckpointConfig(keep=3))
    (folder_of(tmp_path, 1) / "config.yaml").write_text("broken")
    with pytest.warns(UserWarning, match=r"step-00000001.*config\.yaml"):
        checkpoint = best(tmp_path)
    assert checkpoint is not None
    assert checkpoint.meta.step == 2
    assert apply_retention(tmp_path, settings, None) == []
    assert kept(tmp_path) == [2, 3]


def test_nothing_is_removed_while_the_newest_checkpoint_is_damaged(
    alone: Groups, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trained(alone)
    for step in (1, 2):
        write(engine, step)
    rename = Path.rename

    def spoiling(path: Path, target: Path) -> Path:
        if path.name == ".step-00000003.temporary":
            file = path / "model-00000.safetensors"
            file.write_bytes(file.read_bytes()[:-4] + b"oops")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", spoiling)
    write(engine, 3)
    assert kept(tmp_path) == [1, 2, 3]
    assert "nothing is removed" in capsys.readouterr().err


def test_failed_removal_is_reported_and_training_continues(
    alone: Groups, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trained(alone)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("not yours")

    write(engine, 1, settings=CheckpointConfig(keep=1))
    monkeypatch.setattr("hybridtron.checkpoint.folder.shutil", type("shutil", (), {"rmtree": refused}))
    write(engine, 2, settings=CheckpointConfig(keep=1))
    assert "not yours" in capsys.readouterr().err
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.meta.step == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_ends_after_a_number_of_failed_saves(
    alone: Groups,
    tmp_path: Path,
    write: Write,
    asynchronous: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = trained(alone)
    engine.config.checkpoint = CheckpointConfig(asynchronous=asynchronous, failures=2)
    saver = Saver(RunPlan.of(engine.config), tmp_path, alone)
    tokenizer = tmp_path / "tokenizer.json"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    saver.save(engine, meta_of(engine, 1, {}), tokenizer)
    saver.settle()
    with monkeypatch.context() as patch:
        patch.setattr("hybridtron.checkpoint.node_files.write_part", full)
        saver.save(engine, meta_of(engine, 2, {}), tokenizer)
        saver.settle()
    said = capsys.readouterr().err
    assert "step 2 (1 of 2)" in said
    assert "[Errno 28]" in said
    assert str(tmp_path / "checkpoints") in said
    assert list(tmp_path.glob("checkpoints/.step-*")) == []  # it would take the room that is missing
    saver.save(engine, meta_of(engine, 3, {}), tokenizer)
    saver.settle()
    monkeypatch.setattr("hybridtron.checkpoint.node_files.write_part", full)
    save_and_wait(saver, engine, 4, tokenizer)
    with pytest.raises(SaveError):
        save_and_wait(saver, engine, 5, tokenizer)
    assert kept(tmp_path) == [1, 3]


def save_and_wait(saver: Saver, engine: Engine, step: int, tokenizer: Path) -> None:
    saver.save(engine, meta_of(engine, step, {}), tokenizer)
    saver.settle()


def sealed(folder: Path, change: dict[str, object]) -> None:
    """Change the content of a manifest and digest it again."""
    file = folder / manifest.FILE
    content = json.loads(file.read_bytes())["content"] | change
    body = json.dumps(content).encode()
    file.write_bytes(b'{"digest": "' + digest_of(body).encode() + b'", "content": ' + body + b"}\n")


def test_newer_format_is_refused_and_older_ones_are_migrated(
    alone: Groups, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = write(trained(alone))
    sealed(saved, {"format": manifest.FORMAT + 1})
    with pytest.raises(BrokenCheckpoint) as refused:
        Checkpoint.open(saved)
    assert refused.value.code == "unsupported"
    monkeypatch.setitem(manifest.MIGRATIONS, 1, lambda content: content | {"format": 2, "meta": content["old_meta"]})
    monkeypatch.setitem(manifest.MIGRATIONS, 2, lambda content: content | {"format": manifest.FORMAT})
    meta = dataclasses.asdict(meta_of(trained(alone), 7, {}))
    sealed(saved, {"format": 1, "meta": None, "old_meta": meta})
    assert Checkpoint.open(saved).meta.step == 7


def test_guard_is_restored_also_from_older_manifests(alone: Groups, write: Write, tmp_path: Path) -> None:
    engine = trained(alone)
    engine.guard.accepts(float("nan"), 1.0)
    saved = write(engine)
    other = Engine(resolve(engine.config)[0], alone)
    restore_newest([Checkpoint.open(saved)], serving(other), tmp_path)
    assert (list(other.guard.norms), other.guard.refused) == (list(engine.guard.norms), 1)
    meta = json.loads((saved / manifest.FILE).read_bytes())["content"]["meta"]
    sealed(saved, {"meta": {key: meta[key] for key in meta if key not in ("norms", "refused", "windows")}})
    restore_newest([Checkpoint.open(saved)], serving(other), tmp_path)
    assert (list(other.guard.norms), other.guard.refused) == ([], 0)


def test_tensor_with_a_missing_part_is_refused(alone: Groups, write: Write) -> None:
    saved = write(trained(alone))
    content = json.loads((saved / manifest.FILE).read_bytes())["content"]
    sealed(saved, {"chunks": [c for c in content["chunks"] if c[0] != "norm.weight"] + content["chunks"][:1]})
    with pytest.raises(BrokenCheckpoint) as refused:
        Checkpoint.open(saved)
    assert refused.value.code == "missing"


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../config.yaml": {"size": 1, "head": 1, "digest": ""}}},
        {"files": {}},
        {"files": []},
        {"meta": {"step": 7}},
        {"chunks": [["norm.weight"]]},
        {"format": None},
    ],
    ids=lambda change: str(change)[:20],
)
def test_malformed_manifest_is_refused(alone: Groups, write: Write, change: dict[str, object]) -> None:
    saved = write(trained(alone))
    sealed(saved, change)
    with pytest.raises(BrokenCheckpoint):
        Checkpoint.open(saved)


@pytest.mark.parametrize("change", [{1: "F8_E4M3"}, {6: 2**62}, {4: (2**62,)}, {4: (-1,), 2: (-1,)}])
def test_impossible_chunk_is_refused_without_allocating_memory(
    alone: Groups, write: Write, change: dict[int, object]
) -> None:
    saved = write(trained(alone))
    content = json.loads((saved / manifest.FILE).read_bytes())["content"]
    chunk = next(chunk for chunk in content["chunks"] if chunk[0] == "norm.weight")
    for place, value in change.items():
        chunk[place] = value
    if 4 in change:
        chunk[2] = chunk[4]
    sealed(saved, content)
    with pytest.raises(BrokenCheckpoint):
        Checkpoint.open(saved).whole("norm.weight")


@pytest.mark.parametrize("after", [6, 0])
def test_pointer_names_no_checkpoint_that_was_renamed(after: int, alone: Groups, write: Write, tmp_path: Path) -> None:
    engine = trained(alone, steps=0)
    for step in (5, 10):
        write(engine, step)
    assert pointer_fault(tmp_path) is None
    assert len(archive_later(tmp_path, after, "suspect")) == 2 - (after > 0)
    assert pointer_fault(tmp_path) is None
    assert [checkpoint.meta.step for checkpoint in valid_checkpoints(tmp_path)] == [5] * (after > 0)
