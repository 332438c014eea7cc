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
from hybridtron.checkpoint.restore import Border, check_given, restore_newest
from hybridtron.checkpoint.save import Saver, meta_of
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
    one = [one for one in engine.blocks()[kind] if one.key.startswith(key) and one.data.numel()][-1]
    one.data.view(-1)[one.data.numel() // 2] = value
    return one.key


def tensors(*values: float, dtype: torch.dtype = torch.float32) -> list[object]:
    made = torch.tensor(values, dtype=dtype)
    return [block("t", made.shape, (0,), made, main=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_finite(dtype: torch.dtype) -> None:
    greatest = torch.finfo(dtype).max
    assert not_finite([]) is None
    assert not_finite(tensors(dtype=dtype)) is None
    assert not_finite(tensors(0.0, -1.0, dtype=dtype) + tensors(1, 2, dtype=torch.int64)) is None
    assert dtype == torch.float64 or not_finite(tensors(greatest, -greatest, dtype=dtype)) is None
    for value in (math.nan, math.inf, -math.inf):
        assert not_finite(tensors(1.0, dtype=dtype) + tensors(0.0, value, 1.0, dtype=dtype)) == "t"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("kind", "key", "value"), POISONS)
def test_it_is_not_saved(
    alone: Groups, write: Write, tmp_path: Path, kind: str, key: str, value: float, asynchronous: bool
) -> None:
    """An asynchronous save does not look before it returns: its copies are asked after the next update."""
    engine = trained(alone)
    write(engine, 1)
    before = sorted(tmp_path.rglob("*"))
    engine.config.checkpoint = CheckpointConfig(asynchronous=asynchronous)
    saver = Saver(engine.config, tmp_path, alone)
    poisoned = poison(engine, kind, key, value)
    with nullcontext() if asynchronous else pytest.raises(NotFinite, match=poisoned):
        saver.save(engine, meta_of(engine, 2, {}), tmp_path / "tokenizer.json")
    with pytest.raises(NotFinite, match=poisoned) if asynchronous else nullcontext():
        saver.check()
    saver.finish()
    assert sorted(tmp_path.rglob("*")) == before
    assert saver.written == set()


def test_fp8_statistics_are_not_asked(alone: Groups, write: Write) -> None:
    engine = trained(alone, "fp8_delayed")
    engine.blocks()["fp8"][0].data.fill_(math.inf)
    assert not list(Checkpoint.open(write(engine)).faults())


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let saves write any values, without the check for finite ones."""
    monkeypatch.setattr("hybridtron.checkpoint.save.not_finite", lambda blocks: None)


@pytest.mark.parametrize(("kind", "key", "value"), POISONS)
@pytest.mark.usefixtures("careless")
def test_an_older_checkpoint_is_taken(
    alone: Groups, write: Write, tmp_path: Path, kind: str, key: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = trained(alone)
    older = write(engine, 1)
    poisoned = poison(engine, kind, key, value)
    saved = write(engine, 2)
    assert [poisoned in fault for fault in Checkpoint.open(saved).faults()] == [True]
    found = restore_newest(valid_checkpoints(tmp_path), serving(Engine(engine.config, alone)), tmp_path)
    assert found.folder == older
    assert all_of(tmp_path) == [older]
    assert saved.with_name(f"broken-{saved.name}").is_dir()
    assert poisoned in capsys.readouterr().err


@pytest.mark.usefixtures("careless")
def test_given_weights_with_it_are_named_by_their_key(alone: Groups, write: Write, tmp_path: Path) -> None:
    engine = trained(alone)
    own = Checkpoint.open(write(engine, 1))
    poison(engine, "model", "norm.weight", math.nan)
    given = Checkpoint.open(write(engine, 2).rename(tmp_path / "given"))
    border = Border(given, moments=False, key="phases.1.init_from")
    for read in (
        lambda: restore_newest([own], lambda _: (engine, border), tmp_path),
        lambda: check_given(given, alone, "phases.1.init_from"),
    ):
        with pytest.raises(ConfigError) as raised:
            read()
        assert [problem.key for problem in raised.value.problems] == ["phases.1.init_from"]
    assert own.folder.is_dir()


def refused_by(seat: Seat, folder: Path, asynchronous: bool) -> bool:
    """Return True if two processes refuse a save; the second one has a value that is not finite."""
    config = replace(small_run(), checkpoint=CheckpointConfig(asynchronous=asynchronous))
    with seat.groups(ParallelConfig()) as groups:
        engine = Engine(config, groups)
        poison(engine, "optimizer", "exp_avg", math.nan if groups.rank == 1 else 0.0)  # all ranks gather the weights
        saver = Saver(config, folder, groups)
        try:
            saver.save(engine, meta_of(engine, 1, {}), folder / "tokenizer.json")
            saver.check()
        except NotFinite:
            return saver.written == set()
        return False


@pytest.mark.gloo
@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_processes_refuse_what_one_holds(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert run_distributed(refused_by, 2, tmp_path, asynchronous) == [True, True]
    assert not list(tmp_path.glob("checkpoints/.*")) + list(tmp_path.glob("checkpoints/*"))
