"""A supervised run survives each ordeal inside one launch, notices it in time, and ends as an undisturbed run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from hybridtron.proving.chaos import ordeal_hook, ordeals
from hybridtron.proving.chaos.faults import unshare_mounts
from hybridtron.proving.chaos.main import unequal
from hybridtron.proving.chaos.ordeal_hook import (
    BALLAST,
    DISK_MIB,
    KINDS,
    PlannedFault,
    fill_disk_of_its_own,
    marker,
    wait_for_text,
)
from hybridtron.proving.chaos.ordeals import (
    LATE_S,
    LONGEST_LIMIT_S,
    LONGEST_S,
    NEEDS_MOUNTS,
    STEPS,
    Ordeal,
    noticed,
    resume_step,
    run_supervised,
    spare_of,
    step_of,
    wrong,
)
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
@pytest.mark.timeout(2 * LONGEST_S + 100)  # the first also trains the undisturbed run
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "slow rank"])
def test_run_continues_inside_its_launch(kind: str, undisturbed: Run, home: Path) -> None:
    if kind in NEEDS_MOUNTS and not unshare_mounts():
        pytest.skip("this system allows no mounts")
    run = run_in(home, kind, "dp2")
    ordeal = Ordeal("dp2", PlannedFault(kind, 1, step_of(kind, 0)))
    codes = run_supervised(run, "dp2", home / "disk", ordeal.fault)
    assert wrong(run, ordeal, codes) == [], (run.home / "task-0.log").read_text()
    assert unequal(undisturbed, run) == []
    recorded = faults.read(run.folder)
    if recorded:
        assert "time lost by cause" in (run.home / "task-0.log").read_text()
    assert not list(run.folder.glob(".supervisors*"))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S + 100)
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


def hang(limit_s: float, rank: int = 1, resumed: int = 10, spare: str = "") -> RankFault:
    fault = RankFault(FOUND, "hung in step", rank, "n2", "no progress", "step", "step 12", limit_s, 11, found_s=10)
    fault.resumed = resumed
    fault.spare = spare
    return fault


def test_hang_must_be_found_by_its_sections_limit(tmp_path: Path) -> None:
    run, ordeal = imagined(tmp_path / "in time", "hung in step", hang(limit_s=6))
    assert wrong(run, ordeal, [0, 0, 0]) == []
    run, ordeal = imagined(tmp_path / "late", "hung in step", hang(limit_s=9 - LATE_S))
    assert wrong(run, ordeal, [0, 0, 0]) == ["noticed after 10.0 s, of 9.0"]
    run, ordeal = imagined(tmp_path / "long", "hung in step", hang(limit_s=LONGEST_LIMIT_S + 1))
    assert [text.split(" was")[0] for text in wrong(run, ordeal, [0, 0, 0])] == ["the section's limit"]


def test_notice_before_the_fault_is_wrong(tmp_path: Path) -> None:
    run, ordeal = imagined(tmp_path, "hung in step", hang(limit_s=6))
    begun = marker(run.folder, ordeal.kind)
    os.utime(begun, (FOUND + 1, FOUND + 1))
    assert wrong(run, ordeal, [0, 0, 0]) == [f"noticed after -1.0 s, of {6 + LATE_S:.1f}"]


def test_restart_from_an_old_checkpoint_or_on_a_wrong_node_is_reported(tmp_path: Path) -> None:
    run, ordeal = imagined(tmp_path / "old", "hung in step", hang(limit_s=6, resumed=8))
    assert wrong(run, ordeal, [0, 0, 0]) == ["training continued from step 8, and not from step 10"]
    run, ordeal = imagined(tmp_path / "node", "hung in step", hang(limit_s=6, spare="n3"))
    assert wrong(run, ordeal, [0, 0, 0]) == ["the spare node was n3, and should be not used"]


@pytest.mark.parametrize(
    ("kind", "rank", "step", "resumed", "spare"),
    [
        ("killed", 0, 11, 10, ""),
        ("hung in step", 1, 15, 14, ""),
        ("hung in save", 1, 12, 10, ""),
        ("corrupt", 1, 11, 10, "n3"),
        ("corrupt", 0, 15, 14, ""),
        ("lost node", 1, 11, 10, "n3"),
        ("broken neighbour copy", 1, 15, 12, "n3"),
    ],
)
def test_restart_that_each_fault_must_lead_to(kind: str, rank: int, step: int, resumed: int, spare: str) -> None:
    fault = PlannedFault(kind, rank, step)
    assert step in (step_of(kind, 0), step_of(kind, 1))
    assert resume_step(fault) == resumed
    assert spare_of(Ordeal("tp2", fault)) == spare


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
    lost.resumed = 8
    lost.spare = "n3"
    run, ordeal = imagined(tmp_path, "broken neighbour copy", lost)
    assert wrong(run, ordeal, [0, -9, 0]) == ["the log does not name the broken copy"]
    said = "LOCAL CHECKPOINT: the copy on node n1 of the part of node n3 is damaged: digest\n"
    (run.home / "task-0.log").write_text(said)
    assert wrong(run, ordeal, [0, -9, 0]) == []


def test_slow_rank_and_full_disk_are_counted_in_steps(tmp_path: Path) -> None:
    run, ordeal = imagined(tmp_path / "slow", "slow rank")
    write_slow(run, {31: {"n2 rank 1": 2.0}, 32: {"n2 rank 1": 2.0}})
    seen = noticed(run, ordeal)
    assert seen is not None
    assert (seen.after, seen.limit, seen.unit) == (20, 20, "steps")
    run, ordeal = imagined(tmp_path / "full", "full local disk")
    (run.home / "task-0.log").write_text(full_at(14, "n2"))
    seen = noticed(run, ordeal)
    assert seen is not None
    assert (seen.after, seen.limit, seen.unit) == (3, 4, "steps")


def write_slow(run: Run, slow: Mapping[int, Mapping[str, float]]) -> None:
    """Write the metrics of 33 steps; `slow` has the slow ranks of some of them."""
    lines = [{"step": step, "slow_ranks": slow.get(step)} for step in range(1, 34)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def full_at(step: int, node: str, error: str = "No space left on device") -> str:
    return (
        f"LOCAL CHECKPOINT NOT WRITTEN at step {step}: OSError: node {node}: [Errno 28] {error}; training continues\n"
    )


def test_rank_that_is_named_before_its_fault_or_with_others_is_not_noticed(tmp_path: Path) -> None:
    run, ordeal = imagined(tmp_path, "slow rank")
    write_slow(run, {11: {"n2 rank 1": 2.0}, 12: {"n2 rank 1": 2.0}})
    assert noticed(run, ordeal) is None
    write_slow(run, {12: {"n2 rank 1": 2.0, "n1 rank 0": 0.2}, 13: {"n3 rank 2": 0.2}})
    assert noticed(run, ordeal) is None


def test_unwritten_checkpoint_before_the_fault_or_on_another_node_is_no_notice(tmp_path: Path) -> None:
    run, ordeal = imagined(tmp_path, "full local disk")
    log = run.home / "task-0.log"
    log.write_text(full_at(10, "n2") + full_at(14, "n1") + full_at(14, "n2", "Input/output error"))
    assert noticed(run, ordeal) is None
    log.write_text(full_at(10, "n2") + full_at(14, "n2"))
    seen = noticed(run, ordeal)
    assert seen is not None
    assert seen.after == 3


def test_rank_does_not_wait_for_ever_for_the_broken_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordeal_hook, "WAIT_S", 0.0)
    with pytest.raises(RuntimeError, match="no rank has written"):
        wait_for_text(tmp_path / "ordeal")


def test_large_disk_is_never_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused although the folder is a mount point."""
    monkeypatch.setattr(Path, "is_mount", lambda path: True)
    sizes = os.statvfs(tmp_path)
    assert sizes.f_blocks * sizes.f_frsize > DISK_MIB * 2**20
    with pytest.raises(RuntimeError, match="no file system of its own"):
        fill_disk_of_its_own(tmp_path)
    assert not (tmp_path / BALLAST).exists()


def test_disk_of_the_machine_is_never_filled(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no file system of its own"):
        fill_disk_of_its_own(tmp_path)
    assert not list(tmp_path.iterdir())
