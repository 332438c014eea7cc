"""The decision after an attempt: made from the history alone, and requested by the job's script step by step."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridtron.cluster import attempt, attempt_log
from hybridtron.cluster.attempt_log import Attempt, decide
from hybridtron.cluster.preflight import NodeReport

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
def test_decision_follows_from_the_history(attempts: list[tuple], word: str) -> None:
    decision = decide([ended(*attempt) for attempt in attempts])
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


class Check(NamedTuple):
    """The question that a job's script asks after its nodes were checked."""

    nodes: str
    fitting: str
    code: int = 0

    def ask(self, run: Path, capsys: pytest.CaptureFixture[str], restart: int = 0) -> tuple[str, str]:
        options: dict[str, object] = {
            "--nodes": self.nodes,
            "--reports": run / "reports",
            "--fitting": self.fitting,
            "--code": self.code,
            "--restart": restart,
        }
        return ask(run, capsys, "check", *(word for option in options.items() for word in option))


def checkpoint(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08}"
    folder.mkdir()
    (folder / "manifest.json").touch()


def outcome(run: Path, **what: object) -> None:
    """A run's last word, a moment after any other."""
    (run / "outcome.json").write_text(json.dumps(what))
    last = attempt_log.read(run)[-1].outcome_file or 0
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
    assert [(start.step_before, start.step, start.outcome) for start in attempt_log.read(run)] == [
        (0, 100, "preempted"),
        (100, 100, "finished"),
    ]


def test_outcome_of_an_earlier_start_is_not_used_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(run, capsys, "begin", "--nodes", "n1")
    outcome(run, outcome="preempted", step=0, reason="SIGUSR1")
    ask(run, capsys, "end", "--code", 75)
    ask(run, capsys, "begin", "--nodes", "n1", "--restart", 1)
    answer, reported = ask(run, capsys, "end", "--code", 137, "--restart", 1)
    assert answer == "stop - -"
    assert "exit code 137" in reported


def test_attempt_that_slurm_ended_is_recorded_at_the_next_start(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(run, capsys, "begin", "--nodes", "n1,n2")
    checkpoint(run, 5)
    (run / "checkpoints" / "step-00000009").mkdir()  # never sealed
    answer, reported = ask(run, capsys, "begin", "--nodes", "n1,n3", "--restart", 1)
    assert answer == "go - -"
    assert "AGAIN: lost: SLURM" in reported
    ask(run, capsys, "begin", "--nodes", "n1,n3", "--restart", 2)
    assert ask(run, capsys, "begin", "--nodes", "n1,n3", "--restart", 3)[0] == "stop - -"


def test_stopped_chain_stays_stopped_but_a_manual_job_starts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "slurm" / "submission.json").write_text(json.dumps({"jobs": ["7", "8"]}))
    ask(run, capsys, "begin", "--nodes", "n1")
    assert ask(run, capsys, "end", "--code", 2)[0] == "stop - -"
    assert ask(run, capsys, "begin", "--nodes", "n1", job="8")[0] == "stop - -"
    assert ask(run, capsys, "begin", "--nodes", "n1", job="9")[0] == "go - -"


def report(run: Path, node: str, *faults: str, together: str = "") -> None:
    NodeReport(node, list(faults), together, measured=["clock +0.01 s"]).write(run / "reports")


@pytest.mark.parametrize(
    ("fitting", "answer"),
    [("3", "again n3 n3"), ("1,2,3", "go n1,n2 n3"), ("1,3", "go n1 n3")],
)
def test_bad_node_is_excluded_or_the_job_continues_without_it(
    fitting: str, answer: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(run, capsys, "begin", "--nodes", "n1,n2,n3")
    report(run, "n1")
    report(run, "n2")
    report(run, "n3", "GPU 4: remapped_rows.failure is Yes")
    decision, reported = Check("n1,n2,n3", fitting).ask(run, capsys)
    assert decision == answer
    assert "n1: clock +0.01 s" in reported
    assert "BAD NODE n3: GPU 4: remapped_rows.failure is Yes" in reported


def test_excluded_nodes_stay_excluded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for restart, (good, bad) in enumerate((("n1", "n2"), ("n1", "n3"))):
        nodes = f"{good},{bad}"
        ask(run, capsys, "begin", "--nodes", nodes, "--restart", restart)
        report(run, good)
        answer, reported = Check(nodes, "2").ask(run, capsys, restart)
        assert f"BAD NODE {bad}: wrote no report" in reported
    assert answer == "again n2,n3 n3"


@pytest.mark.parametrize("together", ["all-reduce of all nodes: 3 GB/s, 40 are asked for", ""])
def test_fault_of_no_single_node_excludes_no_node(together: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if together:
        report(run, "n1", together=together)
        report(run, "n2")
    for restart, word in enumerate(("again", "stop")):
        ask(run, capsys, "begin", "--nodes", "n1,n2", "--restart", restart)
        answer, reported = Check("n1,n2", "2", code=1).ask(run, capsys, restart)
        assert answer == f"{word} - -"
        assert (together or "exit code 1") in reported


def test_a_rank_that_failed_in_the_check_ends_the_attempt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(run, "n1")
    report(run, "n2")
    report(run, "failed-3", together="all-reduce of all nodes: RuntimeError: out of memory")
    ask(run, capsys, "begin", "--nodes", "n1,n2")
    answer, reported = Check("n1,n2", "2").ask(run, capsys)
    assert answer == "again - -"
    assert "RuntimeError: out of memory" in reported


@pytest.mark.parametrize("missing", ["--fitting", "--reports"])
def test_check_without_a_needed_option_is_refused(missing: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"--fitting": "1,2", "--reports": str(run / "reports")}
    del options[missing]
    words = [word for option in options.items() for word in option]
    with pytest.raises(SystemExit) as ended:
        ask(run, capsys, "check", "--nodes", "n1", *words)
    assert ended.value.code == 2
    assert missing in capsys.readouterr().err
