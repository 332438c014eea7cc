"""A supervised run survives each ordeal inside one launch, notices it in time, and ends as an undisturbed run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hybridtron.proving.chaos import ordeals
from hybridtron.proving.chaos.faults import unshare_mounts
from hybridtron.proving.chaos.main import unequal
from hybridtron.proving.chaos.ordeal_hook import KINDS, PlannedFault, fill_disk_of_its_own, marker
from hybridtron.proving.chaos.ordeals import LATE_S, LOSES_NODE, STEPS, Ordeal, noticed, run_supervised, step_of, wrong
from hybridtron.proving.chaos.training_run import Run, write_data
from hybridtron.train.supervisor import faults
from hybridtron.train.supervisor.faults import RankFault

FOUND = 1_000_000.0  # the time at which a fault was found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ordeals")
    write_data(folder / "data")
    return folder


def run_in(home: Path, name: str, layout: str) -> Run:
    run = Run(home / name, ordeals.arguments(home / "data", layout, home / "disk"), STEPS[layout])
    run.home.mkdir()
    return run


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> Run:
    run = run_in(home, "undisturbed", "dp2")
    assert run_supervised(run, "dp2", home / "disk") == [0, 0, 0]
    assert faults.read(run.folder) == []
    return run


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "slow rank"])
def test_run_continues_inside_its_launch(kind: str, undisturbed: Run, home: Path) -> None:
    if kind == "full local disk" and not unshare_mounts():
        pytest.skip("this system allows no mounts")
    run = run_in(home, kind, "dp2")
    ordeal = Ordeal("dp2", PlannedFault(kind, 1, step_of(kind, 0)))
    codes = run_supervised(run, "dp2", home / "disk", ordeal.fault)
    assert wrong(run, ordeal, codes) == [], (run.home / "task-0.log").read_text()
    assert unequal(undisturbed, run) == []
    recorded = faults.read(run.folder)
    replaced = kind in (*LOSES_NODE, "corrupt")
    assert [fault.spare for fault in recorded] == ["n3" if replaced else ""] * len(recorded)
    if recorded:
        assert "time lost by cause" in (run.home / "task-0.log").read_text()
    assert not list(run.folder.glob(".supervisors*"))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slow_rank_is_named(home: Path) -> None:
    run = run_in(home, "slow rank", "dp4")
    ordeal = Ordeal("dp4", PlannedFault("slow rank", 2, step_of("slow rank", 0)))
    codes = run_supervised(run, "dp4", home / "disk", ordeal.fault)
    assert wrong(run, ordeal, codes) == []


def imagined(tmp_path: Path, kind: str, *recorded: RankFault) -> tuple[Run, Ordeal]:
    """Return a run whose log has these faults, after a fault of a kind in rank 1 at the time FOUND - 10 s."""
    run = Run(tmp_path, (), 20)
    begun = marker(run.folder, kind)
    begun.parent.mkdir(parents=True)
    begun.touch()
    os.utime(begun, (FOUND - 10, FOUND - 10))
    for fault in recorded:
        faults.record(run.folder, fault)
    return run, Ordeal("dp2", PlannedFault(kind, 1, 11))


def hang(limit_s: float, rank: int = 1) -> RankFault:
    return RankFault(FOUND, "hung in step", rank, "n2", "no progress", "step", "step 12", limit_s, 11, found_s=10)


def test_hang_must_be_found_by_its_sections_limit(tmp_path: Path) -> None:
    run, ordeal = imagined(tmp_path / "in time", "hung in step", hang(limit_s=6))
    assert wrong(run, ordeal, [0, 0, 0]) == []
    run, ordeal = imagined(tmp_path / "late", "hung in step", hang(limit_s=4))
    assert wrong(run, ordeal, [0, 0, 0]) == [f"noticed after 10.0 s, of {4 + LATE_S:.1f}"]


def test_wrong_rank_and_wrong_cause_are_reported(tmp_path: Path) -> None:
    run, ordeal = imagined(tmp_path / "rank", "hung in step", hang(limit_s=6, rank=0))
    assert [text.split(":")[0] for text in wrong(run, ordeal, [0, 0, 0])] == ["another rank is blamed"]
    run, ordeal = imagined(tmp_path / "cause", "hung in save", hang(limit_s=6))
    (text,) = wrong(run, ordeal, [0, 0, 0])
    assert "['hung in save'] was expected" in text


def test_silent_fault_is_reported(tmp_path: Path) -> None:
    for kind in ("slow rank", "full local disk"):
        run, ordeal = imagined(tmp_path / kind, kind)
        assert wrong(run, ordeal, [0, 0, 0]) == ["the fault was not noticed"]
    run, ordeal = imagined(tmp_path / "killed", "killed")
    assert "the fault was not noticed" in wrong(run, ordeal, [0, 0, 0])


def test_broken_copy_must_be_named(tmp_path: Path) -> None:
    lost = RankFault(FOUND - 9, "lost node", 1, "n2", "its supervisor is gone", "step", "step 12", 6, 11, found_s=0)
    run, ordeal = imagined(tmp_path, "broken neighbour copy", lost)
    assert wrong(run, ordeal, [0, -9, 0]) == ["the log does not name the broken copy"]
    said = "LOCAL CHECKPOINT: the copy on node n1 of the part of node n3 is damaged: digest\n"
    (run.home / "task-0.log").write_text(said)
    assert wrong(run, ordeal, [0, -9, 0]) == []


def test_slow_rank_and_full_disk_are_counted_in_steps(tmp_path: Path) -> None:
    run, ordeal = imagined(tmp_path / "slow", "slow rank")
    lines = [{"step": step, "slow_ranks": {"n2 rank 1": 2.0} if step > 30 else None} for step in range(1, 34)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seen = noticed(run, ordeal)
    assert seen is not None
    assert (seen.after, seen.limit, seen.unit) == (20, 20, "steps")
    run, ordeal = imagined(tmp_path / "full", "full local disk")
    (run.home / "task-0.log").write_text("LOCAL CHECKPOINT NOT WRITTEN at step 14: no space; training continues\n")
    seen = noticed(run, ordeal)
    assert seen is not None
    assert (seen.after, seen.limit, seen.unit) == (3, 4, "steps")


def test_disk_of_the_machine_is_never_filled(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no file system of its own"):
        fill_disk_of_its_own(tmp_path)
    assert not list(tmp_path.iterdir())
