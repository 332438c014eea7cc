"""The ranks of a node write into the node's files: a save has as many files as kinds and nodes, whatever the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of, valid_checkpoints
from hybridtron.checkpoint.node_files import Records, failure_record
from hybridtron.checkpoint.restore import restore_newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.engine.engine import Engine
from hybridtron.parallel import control
from hybridtron.parallel.pool import Seat
from tests.conftest import random_batch, serving, small_run
from tests.distributed import run_distributed

SMALL = {"config.yaml", "tokenizer.json", "manifest.json"}
KINDS = 3  # model, optimizer, random


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
        Saver(RunPlan.of(config), run_dir, groups).save(engine, meta_of(engine, 1, {}), run_dir.with_suffix(".json"))
        blocks = [block.data for of_kind in engine.blocks().values() for block in of_kind]
        before = [data.clone() for data in blocks]
        with torch.no_grad():
            for data in blocks:
                data.zero_()
        restore_newest(valid_checkpoints(run_dir), serving(engine), run_dir)
        after = [block.data for of_kind in engine.blocks().values() for block in of_kind]
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
    assert len(tensor_files) == (KINDS * count if pipeline > 1 else 2 * count + 1)  # one replica writes weights
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
    records.put(tmp_path, 0, failure_record("\x00" * 10_000))
    assert records.read(tmp_path, 0) == {"failure": "\x00" * 512}
