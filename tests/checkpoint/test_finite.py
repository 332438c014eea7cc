"""A weight or a moment that is no number is neither saved nor resumed from."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.finite import NotFinite, not_finite
from hybridtron.checkpoint.folder import all_of, valid_checkpoints
from hybridtron.checkpoint.restore import PhaseBoundary, restore_newest, verify_weights
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import CheckpointConfig, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.blocks import block
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from hybridtron.problems import ConfigError
from tests.checkpoint.conftest import Write, trained
from tests.conftest import serving, small_run
from tests.distributed import run_distributed

POISONS = [
    ("model", "norm.weight", math.nan),
    ("optimizer", "exp_avg.", math.nan),
    ("optimizer", "exp_avg_sq.", math.inf),
]


def poison(engine: Engine, kind: str, key: str, value: float) -> str:
    """Put a value into the middle of the last such tensor; its key."""
    poisoned = [block for block in engine.blocks()[kind] if block.key.startswith(key) and block.data.numel()][-1]
    poisoned.data.view(-1)[poisoned.data.numel() // 2] = value
    return poisoned.key


def tensors(*values: float, dtype: torch.dtype = torch.float32) -> list[object]:
    tensor = torch.tensor(values, dtype=dtype)
    return [block("t", tensor.shape, (0,), tensor, main=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_not_finite_returns_the_key_of_the_first_bad_tensor(dtype: torch.dtype) -> None:
    greatest = torch.finfo(dtype).max
    assert not_finite([]) is None
    assert not_finite(tensors(dtype=dtype)) is None
    assert not_finite(tensors(0.0, -1.0, dtype=dtype) + tensors(1, 2, dtype=torch.int64)) is None
    assert dtype == torch.float64 or not_finite(tensors(greatest, -greatest, dtype=dtype)) is None
    for value in (math.nan, math.inf, -math.inf):
        assert not_finite(tensors(1.0, dtype=dtype) + tensors(0.0, value, 1.0, dtype=dtype)) == "t"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("kind", "key", "value"), POISONS)
def test_values_that_are_not_finite_are_not_saved(
    alone: Groups, write: Write, tmp_path: Path, kind: str, key: str, value: float, asynchronous: bool
) -> None:
    """An asynchronous save does not look before it returns: its copies are asked after the next update."""
    engine = trained(alone)
    write(engine, 1)
    before = sorted(tmp_path.rglob("*"))
    engine.config.checkpoint = CheckpointConfig(asynchronous=asynchronous)
    saver = Saver(RunPlan.of(engine.config), tmp_path, alone)
    poisoned = poison(engine, kind, key, value)
    refused = pytest.raises(NotFinite, match=poisoned)
    expected = {"save": refused, "check": nullcontext()}
    if asynchronous:
        expected = {"save": nullcontext(), "check": refused}
    with expected["save"]:
        saver.save(engine, meta_of(engine, 2, {}), tmp_path / "tokenizer.json")
    with expected["check"]:
        saver.check()
    saver.finish()
    assert sorted(tmp_path.rglob("*")) == before
    assert saver.written == set()


def test_fp8_statistics_may_be_infinite(alone: Groups, write: Write) -> None:
    engine = trained(alone, "fp8_delayed")
    engine.blocks()["fp8"][0].data.fill_(math.inf)
    assert not list(Checkpoint.open(write(engine)).faults())


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let saves write any values, without the check for finite ones."""
    monkeypatch.setattr("hybridtron.checkpoint.save.not_finite", lambda blocks: None)


@pytest.mark.parametrize(("kind", "key", "value"), POISONS)
@pytest.mark.usefixtures("careless")
def test_restore_falls_back_to_an_older_finite_checkpoint(
    alone: Groups, write: Write, tmp_path: Path, kind: str, key: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = trained(alone)
    older = write(engine, 1)
    poisoned = poison(engine, kind, key, value)
    saved = write(engine, 2)
    assert [poisoned in fault for fault in Checkpoint.open(saved).faults()] == [True]
    restored = restore_newest(valid_checkpoints(tmp_path), serving(Engine(resolve(engine.config)[0], alone)), tmp_path)
    assert restored.folder == older
    assert all_of(tmp_path) == [older]
    assert saved.with_name(f"broken-{saved.name}").is_dir()
    assert poisoned in capsys.readouterr().err


@pytest.mark.usefixtures("careless")
def test_initial_weights_that_are_not_finite_are_reported_by_their_key(
    alone: Groups, write: Write, tmp_path: Path
) -> None:
    engine = trained(alone)
    intact = Checkpoint.open(write(engine, 1))
    poison(engine, "model", "norm.weight", math.nan)
    poisoned = Checkpoint.open(write(engine, 2).rename(tmp_path / "poisoned"))
    boundary = PhaseBoundary(poisoned, moments=False, key="phases.1.init_from")
    for read in (
        lambda: restore_newest([intact], lambda _: (engine, boundary), tmp_path),
        lambda: verify_weights(poisoned, alone, "phases.1.init_from"),
    ):
        with pytest.raises(ConfigError) as raised:
            read()
        problems = [(problem.key, problem.code) for problem in raised.value.problems]
        assert problems == [("phases.1.init_from", "unreadable")]
    assert intact.folder.is_dir()


def refused_by(seat: Seat, folder: Path, asynchronous: bool) -> bool:
    """Return True if two processes refuse a save; the second one has a value that is not finite."""
    config = replace(small_run(), checkpoint=CheckpointConfig(asynchronous=asynchronous))
    with seat.groups(ParallelConfig()) as groups:
        engine = Engine(resolve(config)[0], groups)
        values = (0.0, math.nan)  # both ranks gather the weights
        poison(engine, "optimizer", "exp_avg", values[groups.rank])
        saver = Saver(RunPlan.of(config), folder, groups)
        try:
            saver.save(engine, meta_of(engine, 1, {}), folder / "tokenizer.json")
            saver.check()
        except NotFinite:
            return saver.written == set()
        return False


@pytest.mark.gloo
@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_processes_refuse_a_value_that_one_holds(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert run_distributed(refused_by, 2, tmp_path, asynchronous) == [True, True]
    assert not list(tmp_path.glob("checkpoints/.*")) + list(tmp_path.glob("checkpoints/*"))
