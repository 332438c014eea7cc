"""What a job's script asks: may this start begin, on which nodes, and what comes after it.

    python -m hybridtron.cluster.attempt begin --run FOLDER --job ID --restart N --nodes a,b
    python -m hybridtron.cluster.attempt check --run ... --nodes a,b --reports FOLDER --code N --fitting 1,2
    python -m hybridtron.cluster.attempt end   --run ... --code N [--stopped]

The last line on stdout is the answer: a word, the nodes that it is about, and the nodes that were found to be bad; a
dash stands for none. `go a,b c`: run on a and b, since c is bad. `again b,c c`: requeue, from now on without b and c.
`done - -`, `stop - -`: this was the last start. Reasons go to stderr, which is the job's log, and to attempts.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridtron.cluster import history
from hybridtron.cluster.history import Attempt, NextStart, Outcome, decide


def main(arguments: list[str]) -> int:
    """Answer one question."""
    parser = argparse.ArgumentParser(description="What a job's script asks.")
    parser.add_argument("question", choices=("begin", "check", "end"))
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--restart", type=int, default=0)
    parser.add_argument("--nodes", type=_names, default=())
    parser.add_argument("--reports", type=Path)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--fitting", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--stopped", action="store_true")
    asked = parser.parse_args(arguments)
    answer = {"begin": begin, "check": check, "end": end}[asked.question](asked)
    print(answer)
    return 0


def begin(asked: argparse.Namespace) -> str:
    """Close an attempt that was left open, and open this one unless the run is at its end."""
    jobs = chain_of(asked.run, asked.job)
    before = history.read(asked.run, jobs)
    if before and before[-1].outcome == "running":
        closed = history.ended(asked.run, before[-1], time.time(), code=None, stopped=False)
        before[-1] = settle(asked.run, [*before[:-1], closed])
    if before and before[-1].decision in ("done", "stop"):
        say(f"nothing to do here: {before[-1].why}")
        return f"{before[-1].decision} - -"
    step = history.newest_step(asked.run)
    seen = history.outcome_written(asked.run)
    history.record(
        asked.run, Attempt(asked.job, asked.restart, asked.nodes, time.time(), step, outcome_file=seen, step=step)
    )
    say(f"attempt {len(before) + 1} on {', '.join(asked.nodes)}, from step {step}")
    return "go - -"


def check(asked: argparse.Namespace) -> str:
    """The nodes to run on, by their reports; where too few are left, the job is requeued without the bad ones."""
    reports = {name: report for name in asked.nodes if (report := _report(asked.reports / f"{name}.json"))}
    for name, report in reports.items():
        say(f"{name}: {', '.join(report['found'])}")
    faults = {name: "; ".join(report["faults"]) for name, report in reports.items() if report["faults"]}
    if reports:
        faults |= {name: "wrote no report" for name in asked.nodes if name not in reports}
    together = next((fault for report in reports.values() if (fault := report["together"])), "")
    if not faults and (together or asked.code or not reports):
        why = together or f"the check ended with exit code {asked.code}; see {asked.reports}/check-*.txt"
        return _ended(asked, outcome="failed", reason=f"the check of the nodes: {why}")
    for name, fault in faults.items():
        say(f"BAD NODE {name}: {fault}")
    good = [name for name in asked.nodes if name not in faults]
    enough = max((count for count in asked.fitting if count <= len(good)), default=0)
    if enough:
        return f"go {','.join(good[:enough])} {','.join(faults) or '-'}"
    reason = "; ".join(f"{name} {fault}" for name, fault in faults.items())
    return _ended(asked, outcome="bad nodes", reason=reason, excluded=tuple(faults))


def end(asked: argparse.Namespace) -> str:
    """What comes after the training that just ended."""
    before = history.read(asked.run, chain_of(asked.run, asked.job))
    closed = history.ended(asked.run, before[-1], time.time(), asked.code, asked.stopped)
    return _answer(settle(asked.run, [*before[:-1], closed]), before)


def _ended(asked: argparse.Namespace, outcome: Outcome, reason: str, excluded: tuple[str, ...] = ()) -> str:
    """End this attempt before any training."""
    before = history.read(asked.run, chain_of(asked.run, asked.job))
    closed = replace(
        before[-1], ended=time.time(), outcome=outcome, reason=reason, excluded=excluded or before[-1].excluded
    )
    return _answer(settle(asked.run, [*before[:-1], closed]), [*before[:-1], closed])


def _answer(attempt: Attempt, all_of_them: Sequence[Attempt]) -> str:
    """The decision, with every node that was found to be bad so far."""
    bad = dict.fromkeys(name for one in all_of_them for name in one.excluded)
    return f"{attempt.decision} {','.join(bad) or '-'} {','.join(attempt.excluded) or '-'}"


def settle(run_dir: Path, attempts: Sequence[Attempt]) -> Attempt:
    """Decide what comes after the last attempt, log and record it."""
    decision: NextStart = decide(attempts)
    say(f"{decision.word.upper()}: {decision.why}")
    settled = replace(attempts[-1], decision=decision.word, why=decision.why)
    history.record(run_dir, settled)
    return settled


def chain_of(run_dir: Path, job: str) -> list[str]:
    """The jobs that were submitted together with this one; itself alone if a person has submitted the script."""
    with suppress(OSError, json.JSONDecodeError):
        jobs: list[str] = json.loads((run_dir / "slurm" / "submission.json").read_text())["jobs"]
        if job in jobs:
            return jobs
    return [job]


def say(text: str) -> None:
    print(f"{time.strftime('%F %T')} {text}", file=sys.stderr)


def _report(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, json.JSONDecodeError):
        return json.loads(path.read_text())
    return None


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
