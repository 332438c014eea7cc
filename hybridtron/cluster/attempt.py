"""Answers to a job script's questions: may this start begin, on which nodes, and should the job be requeued?

    python -m hybridtron.cluster.attempt begin --run FOLDER --job ID --restart N --nodes a,b
    python -m hybridtron.cluster.attempt check --run ... --nodes a,b --reports FOLDER --code N --fitting 1,2
    python -m hybridtron.cluster.attempt end   --run ... --code N [--stopped]

The last line on stdout is the answer: a decision, the nodes that it applies to, and the nodes that were found to be
bad; a dash means none. `go a,b c`: run on a and b, because c is bad. `again b,c c`: requeue, and exclude b and c from
now on. `done - -`, `stop - -`: this was the last start. Reasons are written to stderr, which is the job's log, and also
to attempts.jsonl.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybridtron.cluster import history
from hybridtron.cluster.history import Attempt, Outcome, decide
from hybridtron.cluster.preflight import FAILED
from hybridtron.train.records import read_record


def main(arguments: list[str]) -> int:
    """Answer one question from the job script."""
    parser = argparse.ArgumentParser(description="What a job's script asks.")
    parser.add_argument("question", choices=("begin", "check", "end"))
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--restart", type=int, default=0)
    parser.add_argument("--nodes", type=lambda text: text.split(","), default=[])
    parser.add_argument("--reports", type=Path)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--fitting", type=lambda text: [int(number) for number in text.split(",")])
    parser.add_argument("--stopped", action="store_true")
    asked = parser.parse_args(arguments)
    print({"begin": begin, "check": check, "end": end}[asked.question](asked))
    return 0


def begin(asked: argparse.Namespace) -> str:
    """Close an attempt that was left open, and record a new one unless the run is at its end."""
    before = attempts_of(asked)
    if before and before[-1].outcome == "running":
        before[-1] = settle(asked.run, before[:-1], history.ended(asked.run, before[-1], code=None, stopped=False))
    if before and before[-1].decision in ("done", "stop"):
        say(f"nothing to do here: {before[-1].why}")
        return f"{before[-1].decision} - -"
    step = history.newest_step(asked.run)
    outcome_file = history.outcome_written(asked.run)
    history.record(
        asked.run,
        Attempt(asked.job, asked.restart, asked.nodes, time.time(), step, outcome_file=outcome_file, step=step),
    )
    say(f"attempt {len(before) + 1} on {', '.join(asked.nodes)}, from step {step}")
    return "go - -"


def check(asked: argparse.Namespace) -> str:
    """Choose the nodes to run on from preflight's reports; if too few are good, requeue without the bad ones.

    A fault that no single node is to blame for ends the attempt as failed.
    """
    reports = {name: report for name in asked.nodes if (report := read_record(asked.reports / f"{name}.json"))}
    for name, report in reports.items():
        say(f"{name}: {', '.join(report['found'])}")
    faults = {name: "; ".join(report["faults"]) for name, report in reports.items() if report["faults"]}
    if reports:
        faults |= {name: "wrote no report" for name in asked.nodes if name not in reports}
    of_ranks = [read_record(path) for path in sorted(asked.reports.glob(f"{FAILED}*.json"))]
    together = next((fault for report in (*reports.values(), *of_ranks) if (fault := report.get("together"))), "")
    if not faults and (together or asked.code or not reports):
        why = together or f"the check ended with exit code {asked.code}; see {asked.reports}/check-*.txt"
        return end_before_training(asked, outcome="failed", reason=f"the check of the nodes: {why}")
    for name, fault in faults.items():
        say(f"BAD NODE {name}: {fault}")
    good = [name for name in asked.nodes if name not in faults]
    enough = max((count for count in asked.fitting if count <= len(good)), default=0)
    if enough:
        return f"go {','.join(good[:enough])} {','.join(faults) or '-'}"
    reason = "; ".join(f"{name} {fault}" for name, fault in faults.items())
    return end_before_training(asked, outcome="bad nodes", reason=reason, excluded=tuple(faults))


def end(asked: argparse.Namespace) -> str:
    """Record how training ended, and decide about another attempt."""
    *before, last = attempts_of(asked)
    return answer(before, settle(asked.run, before, history.ended(asked.run, last, asked.code, asked.stopped)))


def end_before_training(
    asked: argparse.Namespace, outcome: Outcome, reason: str, excluded: tuple[str, ...] = ()
) -> str:
    """Record an attempt that its nodes ended before training, and decide about another attempt."""
    *before, last = attempts_of(asked)
    closed = replace(last, ended=time.time(), outcome=outcome, reason=reason, excluded=excluded)
    return answer(before, settle(asked.run, before, closed))


def answer(before: Sequence[Attempt], last: Attempt) -> str:
    """Format a decision as a line: its word, all nodes found to be bad so far, and those found by the last attempt."""
    bad = dict.fromkeys(name for attempt in (*before, last) for name in attempt.excluded)
    return f"{last.decision} {','.join(bad) or '-'} {','.join(last.excluded) or '-'}"


def settle(run_dir: Path, before: Sequence[Attempt], last: Attempt) -> Attempt:
    """Decide about another attempt, then log and record the decision."""
    settled = decide([*before, last])
    say(f"{settled.decision.upper()}: {settled.why}")
    history.record(run_dir, settled)
    return settled


def attempts_of(asked: argparse.Namespace) -> list[Attempt]:
    """Read the attempts of all jobs that were submitted together with this one.

    A script that was submitted by hand is in no such list; then only its own attempts count.
    """
    jobs = read_record(asked.run / "slurm" / "submission.json").get("jobs", [])
    return history.read(asked.run, jobs if asked.job in jobs else [asked.job])


def say(text: str) -> None:
    print(f"{time.strftime('%F %T')} {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
