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
    options = parser.parse_args(arguments)
    if options.question == "check" and (options.reports is None or options.fitting is None):
        parser.error(
            "check needs --reports FOLDER, the folder of the nodes' reports, and --fitting 1,2, the numbers of nodes "
            "that fit the layout"
        )
    print({"begin": begin, "check": check, "end": end}[options.question](options))
    return 0


def begin(options: argparse.Namespace) -> str:
    """Record a new attempt and answer `go`; or repeat the last attempt's decision if it was `done` or `stop`.

    If the last attempt was killed before it could record its end, that end is recorded first.
    """
    before = attempts_of(options)
    if before and before[-1].outcome == "running":
        ended = attempt_log.end_attempt(options.run, before[-1], code=None, stopped=False)
        before[-1] = settle(options.run, before[:-1], ended)
    if before and before[-1].decision in ("done", "stop"):
        say(f"this attempt does nothing: {before[-1].why}")
        return f"{before[-1].decision} - -"
    step = attempt_log.newest_step(options.run)
    outcome_file = attempt_log.outcome_written(options.run)
    attempt_log.record(
        options.run,
        Attempt(options.job, options.restart, options.nodes, time.time(), step, outcome_file=outcome_file, step=step),
    )
    say(f"attempt {len(before) + 1} on {', '.join(options.nodes)}, from step {step}")
    return "go - -"


def check(options: argparse.Namespace) -> str:
    """Choose the nodes to train on, from the nodes' reports.

    If too few nodes are good for the layout, the job is requeued without the bad nodes. If the nodes fail together,
    and no single node is at fault, the attempt has failed. With --copy, the attempt also fails if every node has a
    fault.
    """
    reports = {name: report for name in options.nodes if (report := read_record(options.reports / f"{name}.json"))}
    for name, report in reports.items():
        say(f"{name}: {', '.join(report['measured'])}")
    faults = {name: "; ".join(report["faults"]) for name, report in reports.items() if report["faults"]}
    if reports:
        faults |= {name: "wrote no report" for name in options.nodes if name not in reports}
    of_ranks = [read_record(path) for path in sorted(options.reports.glob(f"{FAILED}*.json"))]
    together = next((fault for report in (*reports.values(), *of_ranks) if (fault := report.get("together"))), "")
    if not faults and (together or options.code or not reports):
        why = together or f"the check ended with exit code {options.code}; see {options.reports}/check-*.txt"
        return end_before_training(options, outcome="failed", reason=f"the check of the nodes failed: {why}")
    if options.copy and len(faults) == len(options.nodes):
        name = options.nodes[0]
        return end_before_training(options, outcome="failed", reason=f"every node fails: {name} {faults[name]}")
    for name, fault in faults.items():
        say(f"BAD NODE {name}: {fault}")
    good = [name for name in options.nodes if name not in faults]
    enough = max((count for count in options.fitting if count <= len(good)), default=0)
    if enough:
        chosen = good[: enough + (options.spares or 0)]
        spares = "" if options.spares is None else f" {len(chosen) - enough}"
        return f"go {','.join(chosen)} {','.join(faults) or '-'}{spares}"
    reason = "; ".join(f"{name} {fault}" for name, fault in faults.items())
    return end_before_training(options, outcome="bad nodes", reason=reason, excluded=tuple(faults))


def end(options: argparse.Namespace) -> str:
    """Record how training ended, and answer with the decision about another attempt."""
    *before, last = attempts_of(options)
    return answer(
        before, settle(options.run, before, attempt_log.end_attempt(options.run, last, options.code, options.stopped))
    )


def end_before_training(
    options: argparse.Namespace, outcome: Outcome, reason: str, excluded: tuple[str, ...] = ()
) -> str:
    """Record that an attempt ended before training because of its nodes, and answer with the decision."""
    *before, last = attempts_of(options)
    ended = replace(last, ended=time.time(), outcome=outcome, reason=reason, excluded=excluded)
    return answer(before, settle(options.run, before, ended))


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


def attempts_of(options: argparse.Namespace) -> list[Attempt]:
    """Return the attempts of all jobs that `hybridtron submit` submitted together with this job.

    If a user submitted this job by calling sbatch, only this job's attempts are returned.
    """
    jobs = read_record(options.run / "slurm" / "submission.json").get("jobs", [])
    return attempt_log.read(options.run, jobs if options.job in jobs else [options.job])


def say(text: str) -> None:
    print(f"{time.strftime('%F %T')} {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
