"""The decision after an attempt: made from the history alone, and requested by the job's script step by step."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtron.cluster import attempt, history
from hybridtron.cluster.history import Attempt, decide

START = Attempt("7", 0, ("n1", "n2"), began=0.0, step_before=0)


def ended(outcome: str, before: int, step: int, excluded: tuple[str, ...] = ()) -> Attempt:
    return replace(START, outcome=outcome, step_before=before, step=step, excluded=excluded, reason="why")


@pytest.mark.parametrize(
    ("attempts", "word"),
    [
        ([("finished", 0, 100)], "done"),
        ([("finished", 100, 100)], "done"),  # nothing was left to do
        ([("refused", 0, 0)], "stop"),
        ([("failed", 0, 0)], "again"),
        ([("failed", 0, 0), ("failed", 0, 0)], "stop"),
        ([("failed", 0, 10), ("failed", 10, 10)], "again"),
        ([("failed", 0, 0), ("failed", 0, 10), ("failed", 10, 10)], "again"),
        ([("failed", 0, 0), ("lost", 0, 0)], "stop"),
        ([("preempted", 0, 0), ("preempted", 0, 0)], "stop"),
        ([("preempted", step, step + 1) for step in range(50)], "again"),
        ([("failed", step, step + 1) for step in range(50)], "again"),
        ([("failed", 10, 4), ("failed", 4, 6)], "again"),  # the newest checkpoint was broken and renamed
        ([("bad nodes", 0, 0, ("n1",)), ("bad nodes", 0, 0, ("n2",))], "again"),
        ([("failed", 0, 0), ("bad nodes", 0, 0, ("n1",)), ("failed", 0, 0)], "stop"),
        ([("bad nodes", 0, 0, ("n1",)), ("failed", 0, 0)], "again"),
    ],
)
def test_what_comes_next(attempts: list[tuple], word: str) -> None:
    decision = decide([ended(*one) for one in attempts])
    assert decision.decision == word
    assert "why" in decision.why or attempts[-1][0] == "finished"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("slurm", "checkpoints", "reports"):
        (tmp_path / name).mkdir()
    return tmp_path


def ask(run: Path, capsys: pytest.CaptureFixture[str], *arguments: object, job: str = "7") -> tuple[str, str]:
    """Return the answer and the logged lines."""
    attempt.main([*map(str, arguments), "--run", str(run), "--job", job])
    reported = capsys.readouterr()
    return reported.out.strip(), reported.err


def checkpoint(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08}"
    folder.mkdir()
    (folder / "manifest.json").touch()


def outcome(run: Path, **what: object) -> None:
    """A run's last word, a moment after any other."""
    (run / "outcome.json").write_text(json.dumps(what))
    last = history.read(run)[-1].outcome_file or 0
    os.utime(run / "outcome.json", ns=(last + 10**9, last + 10**9))


def test_a_preempted_run_is_started_again_and_then_done(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(run, capsys, "begin", "--nodes", "n1,n2")[0] == "go - -"
    checkpoint(run, 100)
    outcome(run, outcome="preempted", step=100, reason="SIGUSR1")
    answer, reported = ask(run, capsys, "end", "--code", 75)
    assert answer == "again - -"
    assert "AGAIN: preempted: SIGUSR1;" in reported
    assert ask(run, capsys, "begin", "--nodes", "n1,n2", "--restart", 1)[0] == "go - -"
    assert ask(run, capsys, "end", "--code", 0, "--restart", 1)[0] == "done - -"
    assert ask(run, capsys, "begin", "--nodes", "n1", "--restart", 2)[0] == "done - -"
    assert [(one.step_before, one.step, one.outcome) for one in history.read(run)] == [
        (0, 100, "preempted"),
        (100, 100, "finished"),
    ]


def test_an_earlier_start_s_last_word_is_not_this_one_s(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(run, capsys, "begin", "--nodes", "n1")
    outcome(run, outcome="preempted", step=0, reason="SIGUSR1")
    ask(run, capsys, "end", "--code", 75)
    ask(run, capsys, "begin", "--nodes", "n1", "--restart", 1)
    answer, reported = ask(run, capsys, "end", "--code", 137, "--restart", 1)
    assert answer == "stop - -"
    assert "exit code 137" in reported


def test_what_slurm_has_ended_is_found_at_the_next_start(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(run, capsys, "begin", "--nodes", "n1,n2")
    checkpoint(run, 5)
    (run / "checkpoints" / "step-00000009").mkdir()  # never sealed
    answer, reported = ask(run, capsys, "begin", "--nodes", "n1,n3", "--restart", 1)
    assert answer == "go - -"
    assert "AGAIN: lost: SLURM" in reported
    ask(run, capsys, "begin", "--nodes", "n1,n3", "--restart", 2)
    assert ask(run, capsys, "begin", "--nodes", "n1,n3", "--restart", 3)[0] == "stop - -"


def test_a_chain_ends_where_one_of_it_has_but_a_script_submitted_by_hand_starts_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "slurm" / "submission.json").write_text(json.dumps({"jobs": ["7", "8"]}))
    ask(run, capsys, "begin", "--nodes", "n1")
    assert ask(run, capsys, "end", "--code", 2)[0] == "stop - -"
    assert ask(run, capsys, "begin", "--nodes", "n1", job="8")[0] == "stop - -"
    assert ask(run, capsys, "begin", "--nodes", "n1", job="9")[0] == "go - -"


def report(run: Path, node: str, *faults: str, together: str = "") -> None:
    reported = {"node": node, "faults": faults, "together": together, "found": ["clock +0.01 s"]}
    (run / "reports" / f"{node}.json").write_text(json.dumps(reported))


@pytest.mark.parametrize(
    ("fitting", "answer"),
    [("3", "again n3 n3"), ("1,2,3", "go n1,n2 n3"), ("1,3", "go n1 n3")],
)
def test_a_bad_node_is_left_out_or_done_without(
    fitting: str, answer: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(run, capsys, "begin", "--nodes", "n1,n2,n3")
    report(run, "n1")
    report(run, "n2")
    report(run, "n3", "GPU 4: remapped_rows.failure is Yes")
    asked = ("check", "--nodes", "n1,n2,n3", "--reports", run / "reports", "--fitting", fitting)
    got, reported = ask(run, capsys, *asked)
    assert got == answer
    assert "n1: clock +0.01 s" in reported
    assert "BAD NODE n3: GPU 4: remapped_rows.failure is Yes" in reported


def test_nodes_that_were_left_out_stay_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for restart, (good, bad) in enumerate((("n1", "n2"), ("n1", "n3"))):
        nodes = f"{good},{bad}"
        ask(run, capsys, "begin", "--nodes", nodes, "--restart", restart)
        report(run, good)
        asked = ("check", "--nodes", nodes, "--reports", run / "reports", "--fitting", 2, "--restart", restart)
        answer, reported = ask(run, capsys, *asked)
        assert f"BAD NODE {bad}: wrote no report" in reported
    assert answer == "again n2,n3 n3"


@pytest.mark.parametrize("together", ["all-reduce of all nodes: 3 GB/s, 40 are asked for", ""])
def test_a_fault_of_no_single_node_excludes_none(together: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if together:
        report(run, "n1", together=together)
        report(run, "n2")
    for restart, word in enumerate(("again", "stop")):
        ask(run, capsys, "begin", "--nodes", "n1,n2", "--restart", restart)
        asked = ("check", "--nodes", "n1,n2", "--reports", run / "reports", "--fitting", 2, "--code", 1)
        answer, reported = ask(run, capsys, *asked, "--restart", restart)
        assert answer == f"{word} - -"
        assert (together or "exit code 1") in reported


def test_a_rank_that_failed_in_the_check_ends_the_attempt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(run, "n1")
    report(run, "n2")
    report(run, "failed-3", together="all-reduce of all nodes: RuntimeError: out of memory")
    ask(run, capsys, "begin", "--nodes", "n1,n2")
    answer, reported = ask(run, capsys, "check", "--nodes", "n1,n2", "--reports", run / "reports", "--fitting", 2)
    assert answer == "again - -"
    assert "RuntimeError: out of memory" in reported
