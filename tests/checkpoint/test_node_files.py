"""The ranks of a node write into the node's files: a save has as many files as kinds and nodes, whatever the ranks."""

from __future__ import annotations

import io
import zlib
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridtron.checkpoint import async_copy, node_files
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.files import head_of_infos, infos_of, plan_chunks, write_bytes, write_part, write_tensors
from hybridtron.checkpoint.folder import folder_of, valid_checkpoints
from hybridtron.checkpoint.manifest import FILE, BrokenCheckpoint, CheckpointManifest, Meta, to_bytes
from hybridtron.checkpoint.node_files import Records, failure_record
from hybridtron.checkpoint.restore import restore_newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.engine.engine import Engine
from hybridtron.parallel import control
from hybridtron.parallel.blocks import block
from hybridtron.parallel.pool import Seat
from tests.conftest import random_batch, serving, small_run
from tests.distributed import run_distributed

SMALL = {"config.yaml", "tokenizer.json", "manifest.json"}
KINDS = 3  # model, optimizer, random


def fill(engine: Engine) -> None:
    """Give every element a value of its own, in moments, too; replicas and stages with the same weight stay equal."""
    for entry in [entry for of_kind in engine.blocks().values() for entry in of_kind]:
        generator = torch.Generator().manual_seed(zlib.crc32(entry.key.encode()))
        whole = 1 + torch.rand(entry.global_shape, generator=generator)
        places = zip(entry.global_offset, entry.local_shape, strict=True)
        with torch.no_grad():
            entry.data.copy_(whole[tuple(slice(first, first + size) for first, size in places)])


def saved(seat: Seat, nodes: str, pipeline: int, run_dir: Path) -> tuple[bool, set[str], int]:
    """Train, save, spoil the weights and restore, on nodes with the names that the letters of `nodes` give.

    Returns whether all blocks are as before, the files before the checkpoint was complete, and the bytes of the blocks.
    """
    control.node_name = lambda: nodes[seat.rank]
    config = small_run(precision="bf16")
    config.parallel.pipeline = pipeline
    config.phases[0].global_batch = 2 * seat.world_size
    (run_dir.with_suffix(".json")).write_text("{}")
    unsealed: set[str] = set()
    seal = Saver._seal

    def listing(saver: Saver, plan: Any, meta: Any) -> None:
        for rank in range(seat.world_size):
            saver._record_of(plan, rank)
        unsealed.update(path.name for path in plan.temporary.iterdir())
        seal(saver, plan, meta)

    Saver._seal = listing  # type: ignore[method-assign]
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        if pipeline == 1:
            engine.forward_backward([random_batch()])
            engine.step(1e-2)
        else:
            fill(engine)
        Saver(RunPlan.of(config), run_dir, groups).save(engine, meta_of(engine, 1, {}), run_dir.with_suffix(".json"))
        blocks = [entry.data for of_kind in engine.blocks().values() for entry in of_kind]
        before = [data.clone() for data in blocks]
        with torch.no_grad():
            for data in blocks:
                data.zero_()
        restore_newest(valid_checkpoints(run_dir), serving(engine), run_dir)
        after = [entry.data for of_kind in engine.blocks().values() for entry in of_kind]
    own = sum(b.data.nbytes for of_kind in engine.blocks().values() for b in of_kind if b.replica_id == 0)
    return all(map(torch.equal, before, after)), unsealed, own


@pytest.mark.gloo
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("nodes", "pipeline"),
    [
        pytest.param("aa", 1, marks=pytest.mark.slow),
        ("aabb", 1),
        pytest.param("abba", 2, marks=pytest.mark.slow),  # the first rank of b writes no weights, and the second does
        pytest.param("aaaabbbb", 1, marks=pytest.mark.slow),
    ],
)
def test_files_are_as_many_as_kinds_and_nodes(nodes: str, pipeline: int, tmp_path: Path) -> None:
    results = run_distributed(saved, len(nodes), nodes, pipeline, tmp_path / "run", timeout_s=240)
    assert all(same for same, _, _ in results)
    checkpoint = Checkpoint.open(folder_of(tmp_path / "run", 1))
    assert not list(checkpoint.faults())
    files = {path.name: path.stat().st_size for path in checkpoint.folder.iterdir()}
    count = len(set(nodes))
    tensor_files = files.keys() - SMALL
    assert len(tensor_files) == KINDS * count
    assert {f"optimizer-{node:05}.safetensors" for node in range(count)} <= tensor_files
    during = results[0][1]
    assert during == tensor_files | (SMALL - {"manifest.json"}) | {f"list-{node:05}" for node in range(count)}
    stored = {key: tensor for name in tensor_files for key, tensor in load_file(checkpoint.folder / name).items()}
    assert len(stored) == len(checkpoint.manifest.chunks)
    for key in checkpoint.shapes.keys() & stored.keys():
        assert torch.equal(stored[key], checkpoint.whole(key))
    random = sum(tensor.nbytes for key, tensor in stored.items() if key.startswith("random."))
    tensors = sum(own for _, _, own in results) + random
    heads = sum(file.head for name, file in checkpoint.manifest.files.items() if name in tensor_files)
    assert sum(files[name] for name in tensor_files) == tensors + heads


def test_a_record_is_read_only_when_all_of_it_is_written(tmp_path: Path) -> None:
    records = Records([[0, 2], [1]], [5000, 4096, 6000])
    assert records.read(tmp_path, 2) is None
    records.put(tmp_path, 2, {"files": 1})
    assert records.read(tmp_path, 0) is None
    assert records.read(tmp_path, 2) == {"files": 1}
    assert (tmp_path / "list-00000").stat().st_size == 11000
    stored = bytearray((tmp_path / "list-00000").read_bytes())
    stored[5040] ^= 1
    (tmp_path / "list-00000").write_bytes(stored)
    assert records.read(tmp_path, 2) is None


def test_the_reason_of_a_failure_has_room_in_the_smallest_record(tmp_path: Path) -> None:
    records = Records([[0]], [4096])
    records.reserve(tmp_path, 0)
    records.put(tmp_path, 0, failure_record("\U0001f4a5" * 10_000))
    values = records.read(tmp_path, 0)
    assert values is not None
    assert values["failure"].startswith("\\U0001f4a5")


def failing(seat: Seat, run_dir: Path) -> tuple[list[str], list[int], list[str]]:
    """Save three times: on rank 1 the disk is full, then the host has no memory, then nothing fails."""
    control.node_name = lambda: "a"
    config = small_run()
    config.phases[0].global_batch = 2 * seat.world_size
    config.checkpoint.asynchronous = True
    run_dir.with_suffix(".json").write_text("{}")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def exhausted(*_: object) -> None:
        raise RuntimeError("out of host memory")

    said: list[str] = []
    failures: list[int] = []
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        saver = Saver(RunPlan.of(config), run_dir, groups, patience_s=30)
        write_part = node_files.write_part
        host_memory_for = async_copy.host_memory_for
        for step in (1, 2, 3):
            if seat.rank == 1 and step == 1:
                node_files.write_part = full  # type: ignore[assignment]
            if seat.rank == 1 and step == 2:
                async_copy.host_memory_for = exhausted  # type: ignore[assignment]
                saver._copier._memory.clear()
            with redirect_stderr(io.StringIO()) as printed:
                saver.save(engine, meta_of(engine, step, {}), run_dir.with_suffix(".json"))
                saver.settle()
            node_files.write_part = write_part
            async_copy.host_memory_for = host_memory_for
            said.append(printed.getvalue())
            failures.append(saver.failures)
    return said, failures, sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.gloo
@pytest.mark.timeout(280)
def test_failure_of_a_rank_of_the_node_is_named_and_the_next_save_succeeds(tmp_path: Path) -> None:
    first, second = run_distributed(failing, 2, tmp_path / "run", timeout_s=240)
    assert first[1] == second[1] == [1, 2, 0]
    assert "rank 1: OSError: [Errno 28]" in first[0][0]
    assert "rank 1: RuntimeError: out of host memory" in first[0][1]
    assert first[2] == ["latest", "step-00000003"]


def test_checkpoint_with_files_of_ranks_is_read(tmp_path: Path) -> None:
    """Version 0.2.0 wrote a file for each rank."""
    whole = torch.arange(12.0).view(4, 3)
    files = {"config.yaml": write_bytes(tmp_path / "config.yaml", b"{}")}
    chunks = []
    for rank in range(2):
        name = f"model-{rank:05}.safetensors"
        part = block("w", (4, 3), (2 * rank, 0), whole[2 * rank : 2 * rank + 2], main=True)
        files[name], written = write_tensors(tmp_path / name, [part])
        chunks += written
    meta = Meta(1, 1, {}, "data 2", torch.__version__)
    write_bytes(tmp_path / FILE, to_bytes(CheckpointManifest(meta, files, tuple(chunks))))
    checkpoint = Checkpoint.open(tmp_path)
    assert not list(checkpoint.faults())
    assert torch.equal(checkpoint.whole("w"), whole)


def test_a_part_of_another_size_than_planned_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "model-00000.safetensors"
    planned = plan_chunks(path.name, [block("w", (2,), (0,), torch.zeros(2), main=True)], 8)
    other = block("w", (3,), (0,), torch.zeros(3), main=True)
    with pytest.raises(BrokenCheckpoint):
        write_part(path, [other], planned, b"")
    infos = infos_of([other, other])
    with pytest.raises(BrokenCheckpoint):
        head_of_infos(infos)
