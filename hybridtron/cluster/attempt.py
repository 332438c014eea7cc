"""Decisions for a job script: may this attempt begin, on which nodes, and should the job be requeued?

    python -m hybridtron.cluster.attempt begin --run FOLDER --job ID --restart N --nodes a,b
    python -m hybridtron.cluster.attempt check --run ... --nodes a,b --reports FOLDER --code N --fitting 1,2 --spares 0
    python -m hybridtron.cluster.attempt check --copy ...
    python -m hybridtron.cluster.attempt end   --run ... --code N [--stopped]

An attempt is one start of a job; a requeued job starts several times. The job script calls `begin` when a job starts,
`check` after the check of the nodes (`preflight.py`) and after the copy of the data (`stage.py`), and `end` after
training. The answer is the last line on stdout. It has three words: DECISION NODES BAD. A dash stands for no nodes. If
`check` gets --spares, its answer `go` has a fourth word: the number of spare nodes, which are the last nodes.

    go a,b c       train on the nodes a and b; this attempt found that node c is bad
    go - -         continue with all nodes (answer of `begin`)
    again b,c c    requeue the job, and exclude the nodes b and c from now on; this attempt found that node c is bad
    done - -       the run has finished
    stop - -       the run has not finished, and its user must act before it can continue

The reasons are written to stderr, which is the job's log, and to the run's slurm/attempts.jsonl. This module must keep
its name, because scripts of queued jobs call it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybridtron.cluster import attempt_log
from hybridtron.cluster.attempt_log import Attempt, Outcome, decide
from hybridtron.cluster.preflight import FAILED
from hybridtron.train.jsonl import read_record


def main(arguments: list[str]) -> int:
    """Answer one question from the job script."""
    parser = argparse.ArgumentParser(description="Decide about attempts of a job, for the job script.")
    parser.add_argument("question", choices=("begin", "check", "end"))
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--restart", type=int, default=0)
    parser.add_argument("--nodes", type=lambda text: text.split(","), default=[])
    parser.add_argument("--reports", type=Path)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--fitting", type=lambda text: [int(number) for number in text.split(",")])
    parser.add_argument("--spares", type=int)
    parser.add_argument("--copy", action="store_true", help="for check: the reports are about the copy of the data")
    parser.add_argument("--stopped", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.question == "check" and (asked.reports is None or asked.fitting is None):
        parser.error(
            "check needs --reports FOLDER, the folder of the nodes' reports, and --fitting 1,2, the numbers of nodes "
            "that fit the layout"
        )
    print({"begin": begin, "check": check, "end": end}[asked.question](asked))
    return 0


def begin(asked: argparse.Namespace) -> str:
    """Record a new attempt and answer `go`; or answer `done` or `stop` if the last attempt ended with this decision.

    If the last attempt was killed before it could record its end, this function first records the end.
    """
    before = attempts_of(asked)
    if before and before[-1].outcome == "running":
        ended = attempt_log.end_attempt(asked.run, before[-1], code=None, stopped=False)
        before[-1] = settle(asked.run, before[:-1], ended)
    if before and before[-1].decision in ("done", "stop"):
        say(f"this attempt does nothing: {before[-1].why}")
        return f"{before[-1].decision} - -"
    step = attempt_log.newest_step(asked.run)
    outcome_file = attempt_log.outcome_written(asked.run)
    attempt_log.record(
        asked.run,
        Attempt(asked.job, asked.restart, asked.nodes, time.time(), step, outcome_file=outcome_file, step=step),
    )
    say(f"attempt {len(before) + 1} on {', '.join(asked.nodes)}, from step {step}")
    return "go - -"


def check(asked: argparse.Namespace) -> str:
    """Choose the nodes to train on, from the nodes' reports.

    If too few nodes are good for the layout, the job is requeued without the bad nodes. If no single node is at fault,
    but the nodes fail together, the attempt has failed. With --copy, it also fails if every node has a fault.
    """
    reports = {name: report for name in asked.nodes if (report := read_record(asked.reports / f"{name}.json"))}
    for name, report in reports.items():
        say(f"{name}: {', '.join(report['measured'])}")
    faults = {name: "; ".join(report["faults"]) for name, report in reports.items() if report["faults"]}
    if reports:
        faults |= {name: "wrote no report" for name in asked.nodes if name not in reports}
    of_ranks = [read_record(path) for path in sorted(asked.reports.glob(f"{FAILED}*.json"))]
    together = next((fault for report in (*reports.values(), *of_ranks) if (fault := report.get("together"))), "")
    if not faults and (together or asked.code or not reports):
        why = together or f"the check ended with exit code {asked.code}; see {asked.reports}/check-*.txt"
        return end_before_training(asked, outcome="failed", reason=f"the check of the nodes failed: {why}")
    if asked.copy and len(faults) == len(asked.nodes):
        name = asked.nodes[0]
        return end_before_training(asked, outcome="failed", reason=f"every node fails: {name} {faults[name]}")
    for name, fault in faults.items():
        say(f"BAD NODE {name}: {fault}")
    good = [name for name in asked.nodes if name not in faults]
    enough = max((count for count in asked.fitting if count <= len(good)), default=0)
    if enough:
        kept = good[: enough + (asked.spares or 0)]
        spares = "" if asked.spares is None else f" {len(kept) - enough}"
        return f"go {','.join(kept)} {','.join(faults) or '-'}{spares}"
    reason = "; ".join(f"{name} {fault}" for name, fault in faults.items())
    return end_before_training(asked, outcome="bad nodes", reason=reason, excluded=tuple(faults))


def end(asked: argparse.Namespace) -> str:
    """Record how training ended, and answer with the decision about another attempt."""
    *before, last = attempts_of(asked)
    return answer(
        before, settle(asked.run, before, attempt_log.end_attempt(asked.run, last, asked.code, asked.stopped))
    )


def end_before_training(
    asked: argparse.Namespace, outcome: Outcome, reason: str, excluded: tuple[str, ...] = ()
) -> str:
    """Record that an attempt ended before training because of its nodes, and answer with the decision."""
    *before, last = attempts_of(asked)
    closed = replace(last, ended=time.time(), outcome=outcome, reason=reason, excluded=excluded)
    return answer(before, settle(asked.run, before, closed))


def answer(before: Sequence[Attempt], last: Attempt) -> str:
    """Return the answer: the decision, all bad nodes of all attempts, and the bad nodes of the last attempt."""
    bad = dict.fromkeys(name for attempt in (*before, last) for name in attempt.excluded)
    return f"{last.decision} {','.join(bad) or '-'} {','.join(last.excluded) or '-'}"


def settle(run_dir: Path, before: Sequence[Attempt], last: Attempt) -> Attempt:
    """Decide about another attempt, log and record the decision, and return the last attempt with this decision."""
    settled = decide([*before, last])
    say(f"{settled.decision.upper()}: {settled.why}")
    attempt_log.record(run_dir, settled)
    return settled


def attempts_of(asked: argparse.Namespace) -> list[Attempt]:
    """Return the attempts of all jobs that `hybridtron submit` submitted together with this job.

    If a user submitted this job by calling sbatch, only this job's attempts are returned.
    """
    jobs = read_record(asked.run / "slurm" / "submission.json").get("jobs", [])
    return attempt_log.read(asked.run, jobs if asked.job in jobs else [asked.job])


def say(text: str) -> None:
    print(f"{time.strftime('%F %T')} {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
