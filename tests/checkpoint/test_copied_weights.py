"""A restart reads each weight once from the file system, however many replicas there are, and the manifest once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint import checkpoint as reading
from hybridtron.checkpoint import manifest
from hybridtron.checkpoint.average import weight_shapes
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import valid_checkpoints
from hybridtron.checkpoint.restore import restore_newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from hybridtron.problems import ConfigError, Problem, Unusable
from hybridtron.train import start
from tests.checkpoint.conftest import Write, trained
from tests.conftest import random_batch, serving, small_run
from tests.distributed import run_distributed

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
Read = dict[str, int]
"""Bytes that a process has read, by kind of file."""


def config_of(ranks: int, precision: str) -> Config:
    config = small_run(precision=precision)
    config.phases[0].global_batch = 2 * ranks
    return config


def restored(seat: Seat, precision: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], Read, list[int]]:
    """Train, save, spoil the weights and restore; return the weights before and after, and what was read."""
    config = config_of(seat.world_size, precision)
    read: Read = {}
    manifests: list[int] = []
    read_chunk = reading.read_chunk
    stored_in = manifest.stored_in

    def counted(folder: Path, chunk: Any, file: Any) -> Tensor:
        kind = chunk.file.split("-")[0]
        tensor = read_chunk(folder, chunk, file)
        read[kind] = read.get(kind, 0) + tensor.nbytes
        return tensor

    def counted_manifest(folder: Path) -> bytes:
        manifests.append(seat.rank)
        return stored_in(folder)

    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        engine.forward_backward([random_batch()])
        engine.step(1e-2)
        saver = Saver(RunPlan.of(config), folder, groups)
        folder.with_suffix(".json").write_text("{}")
        saver.save(engine, meta_of(engine, 1, {}), folder.with_suffix(".json"))
        before = {name: weight.detach().clone() for name, weight in engine._current_weights()}
        config.run.dir = str(folder)
        with torch.no_grad():
            for _, weight in engine._current_weights():
                weight.fill_(7.0)
        reading.read_chunk = counted
        manifest.stored_in = start.stored_in = counted_manifest
        point = start.shared_starting_point(config, groups.control)
        assert point is not None
        restore_newest([point], serving(engine), folder)
        after = {name: weight.detach().clone() for name, weight in engine._current_weights()}
    return before, after, read, manifests


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (4, 8))])
def test_replicas_read_the_weights_once_together(ranks: int, precision: str, tmp_path: Path) -> None:
    results = run_distributed(restored, ranks, precision, tmp_path / "run", timeout_s=200)
    for before, after, _, _ in results:
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    (stored,) = {checkpoint.folder: checkpoint for checkpoint in valid_checkpoints(tmp_path / "run")}.values()
    sizes: Read = {}
    for name, file in stored.manifest.files.items():
        kind = name.split("-")[0]
        sizes[kind] = sizes.get(kind, 0) + file.size - file.head
    total = {kind: sum(read.get(kind, 0) for _, _, read, _ in results) for kind in ("model", "optimizer")}
    print(
        ranks,
        precision,
        "bytes stored",
        sizes,
        "read by all",
        total,
        "by a rank",
        [r.get("model", 0) for _, _, r, _ in results],
    )
    assert total["model"] == sizes["model"]
    assert max(read.get("model", 0) for _, _, read, _ in results) < sizes["model"]
    assert total["optimizer"] == sizes["optimizer"]  # each rank has its own elements
    assert [bool(manifests) for _, _, _, manifests in results] == [True, *[False] * (ranks - 1)]


def initialised(seat: Seat, precision: str, base: Path) -> tuple[dict[str, Tensor], Read]:
    """Build an engine with initial weights from a checkpoint; return its weights, and the bytes that were read."""
    read: Read = {}
    read_chunk = reading.read_chunk

    def counted(folder: Path, chunk: Any, file: Any) -> Tensor:
        tensor = read_chunk(folder, chunk, file)
        kind = chunk.file.split("-")[0]
        read[kind] = read.get(kind, 0) + tensor.nbytes
        return tensor

    config = config_of(seat.world_size, precision)
    with seat.groups(config.parallel) as groups:
        phase = resolve(config)[0]
        reading.read_chunk = counted
        engine = Engine(phase, groups, start.weights_of(Checkpoint.open(base), phase))
        reading.read_chunk = read_chunk
        return {name: weight.detach().clone() for name, weight in engine._current_weights()}, read


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_replicas_read_initial_weights_once_together(
    precision: str, write: Write, alone: Groups, tmp_path: Path
) -> None:
    base = write(trained(alone, precision), 1)
    checkpoint = Checkpoint.open(base)
    engine = Engine(resolve(config_of(1, precision))[0], alone, checkpoint.weights(checkpoint.plan.arch.table))
    expected = {name: weight.detach().clone() for name, weight in engine._current_weights()}
    results = run_distributed(initialised, 2, precision, base, timeout_s=200)
    for weights, _ in results:
        assert weights.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
    stored = sum(math.prod(shape) * 4 for shape in weight_shapes(checkpoint).values())
    total = sum(sum(read.values()) for _, read in results)
    print(precision, "bytes of fp32 weights", stored, "read by all", total)
    if precision == "fp32":  # with bf16 each rank also reads the weights of which it has elements of masters
        assert total == stored
        assert max(read["model"] for _, read in results) < stored


def failed(seat: Seat, precision: str) -> str:
    """Build an engine with initial weights, of which one read of rank 1 fails; return the error."""
    config = config_of(seat.world_size, precision)
    phase = resolve(config)[0]
    reads: list[str] = []

    def load(name: str) -> Tensor:
        reads.append(name)
        if seat.rank == 1 and (precision == "fp32" or reads.count(name) > 1):  # in bf16, the read of the masters
            raise OSError(5, "the file vanished")
        return torch.zeros(phase.table[name].shape)

    with seat.groups(config.parallel) as groups:
        try:
            Engine(phase, groups, load)
        except (OSError, Unusable) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_all_ranks_fail_if_a_reader_of_initial_weights_fails(precision: str) -> None:
    """The other rank does not wait for the reader's broadcast."""
    first, second = run_distributed(failed, 2, precision, timeout_s=100)
    assert first == "Unusable: rank 1: OSError: [Errno 5] the file vanished"
    assert second == "OSError: [Errno 5] the file vanished"


def refused(seat: Seat, folder: Path) -> list[Problem]:
    config = config_of(seat.world_size, "fp32")
    config.run.dir = str(folder)
    with seat.groups(ParallelConfig()) as groups:
        try:
            start.shared_starting_point(config, groups.control)
        except ConfigError as error:
            return list(error.problems)
    return []


def test_all_ranks_refuse_what_the_first_refuses(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    first, second = run_distributed(refused, 2, tmp_path)
    assert [problem.code for problem in first] == ["unreadable"]
    assert first == second


def test_a_passed_manifest_is_verified_again(tmp_path: Path) -> None:
    with pytest.raises(manifest.BrokenCheckpoint):
        Checkpoint.of_manifest(tmp_path / "step-00000001", b"{}")
