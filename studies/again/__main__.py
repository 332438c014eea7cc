"""Claims of the four papers again, with settings that are nearer to theirs and more seeds.

    python -m studies.again copying --runs STATE --results RESULTS      resumes where it was stopped
    python -m studies.again length --quick --runs DIR --results DIR --output DIR

Experiments: length, copying, span, grown, keys, recall. rules.md has size, rule and expectation of each, and was
written before its first run. One run trains at a time, and a bar shows the time that is left. Each writes a page
EXPERIMENT.md.

Exit codes: 0 written; 1 a run failed; 2 a wrong argument, or the folder holds runs with other settings; 75 stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import studies.grown.runs as grown
import studies.joint_recall.runs as recall
import studies.length_story.runs as story
import studies.passkey.samples as passkey
import studies.span_study.runs as span
from hybridtron.problems import did_you_mean
from hybridtron.proving.measuring import BenchReport, markdown
from studies.again import length_parts as length
from studies.again import parts, verdicts
from studies.judge import notes as judged_by
from studies.papers.claim import Kept
from studies.results import Results, results_of
from studies.study import Measured, Plan, conduct, parse

HEADER = ("claim", "ours", "verdict")


@dataclass(frozen=True)
class Experiment:
    """Runs, their data, and the claims that their results decide."""

    title: str
    prepare: Callable[[], None]
    plan: Callable[[], Plan]
    claims: Callable[[], Iterator[verdicts.Claim]]
    before: Measured = field(default_factory=dict)  # results of another study that the claims need too


def main(arguments: list[str]) -> int:
    """Train the missing runs of an experiment, measure them, and write its page. Returns the exit code."""
    name, chosen = parsed(arguments)
    experiment = EXPERIMENTS[name](chosen)
    if not chosen.measure:
        experiment.prepare()
    while True:
        known = set(experiment.plan())
        code = conduct(chosen, experiment.plan, partial(write, name, experiment, chosen))
        if code or chosen.measure or set(experiment.plan()) == known:  # results can add parts to the plan
            return code


def parsed(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """Parse the experiment's name and its options; data stand beside the runs."""
    names = argparse.ArgumentParser(prog="studies.again", description="Claims of four papers again.", add_help=False)
    names.add_argument("experiment", metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    known, rest = names.parse_known_args(arguments)
    if known.experiment not in EXPERIMENTS:
        names.error(f"there is no {known.experiment!r}{did_you_mean(known.experiment, EXPERIMENTS)}")
    chosen = parse("Claims of four papers again.", "again", ["--jobs", "1", *rest])
    chosen.runs = chosen.runs / known.experiment
    chosen.data = chosen.runs / "data"
    chosen.results = chosen.results or results_of("again")
    return known.experiment, chosen


def of_length(chosen: argparse.Namespace) -> Experiment:
    sizes = length.QUICK if chosen.quick else length.STUDY
    kept = Results(chosen.results)
    trial = length.trial_part(sizes, chosen.runs, chosen.data)

    def claims() -> Iterator[verdicts.Claim]:
        if setting := length.chosen(trial, kept):
            yield from verdicts.of_length(setting.context)

    return Experiment(
        "Length generalization",
        lambda: length.write_text(sizes, chosen.data),
        lambda: length.planned(sizes, chosen.runs, chosen.data, kept),
        claims,
    )


def of_copying(chosen: argparse.Namespace) -> Experiment:
    sizes = parts.copying_sizes(chosen.quick)
    return Experiment(
        "Copying in rows that end with the string",
        lambda: story.write_copying_data(sizes, chosen.runs),
        lambda: {"copying": story.part_of("copying", sizes, chosen.runs)},
        verdicts.of_copying,
    )


def of_span(chosen: argparse.Namespace) -> Experiment:
    sizes = parts.span_sizes(chosen.quick)
    return Experiment(
        "Spans with ten seeds",
        lambda: span.write_rows(sizes, chosen.data),
        lambda: {"span": span.part_of(sizes, chosen.runs, chosen.data)},
        verdicts.of_spans,
    )


def of_grown(chosen: argparse.Namespace) -> Experiment:
    sizes = parts.grown_sizes(chosen.quick)
    return Experiment(
        "HAX grown, five seeds",
        lambda: grown.write_samples(sizes, chosen.data),
        lambda: {"grown": grown.part_of(sizes, chosen.runs, chosen.data)},
        verdicts.of_grown,
    )


def of_keys(chosen: argparse.Namespace) -> Experiment:
    sizes = parts.passkey_sizes(chosen.quick)
    return Experiment(
        "Keys from fitted noise, five seeds",
        lambda: passkey.write_samples(sizes, chosen.data),
        lambda: {"passkey": parts.keys_part(chosen.quick, chosen.runs, chosen.data)},
        verdicts.of_keys,
    )


def of_recall(chosen: argparse.Namespace) -> Experiment:
    before = parts.recall_before(chosen.runs, chosen.data)
    return Experiment(
        "Joint recall with more seeds",
        lambda: recall.write_rows(parts.recall_sizes(chosen.quick), chosen.data),
        lambda: parts.recall_plan(chosen.quick, chosen.runs, chosen.data),
        verdicts.of_recall,
        before,
    )


EXPERIMENTS: dict[str, Callable[[argparse.Namespace], Experiment]] = {
    "length": of_length,
    "copying": of_copying,
    "span": of_span,
    "grown": of_grown,
    "keys": of_keys,
    "recall": of_recall,
}


def write(
    name: str,
    experiment: Experiment,
    chosen: argparse.Namespace,
    measured: Measured,
    more: list[str],
    output: Path,
) -> None:
    """Write the page: verdicts, and every configuration that was tried in a search."""
    minutes = sum(result.minutes for part in measured.values() for _, result in part)
    count = sum(map(len, measured.values()))
    notes = [
        "rules, written before the first run: [rules.md](rules.md)",
        f"{count} runs, {minutes / 60:.1f} hours of steps",
    ]
    report = BenchReport(experiment.title, notes=[*notes, *judged_by(), *more])
    kept = Kept({**experiment.before, **measured}, {})
    rows = []
    for claim in experiment.claims():
        verdict = verdicts.judged(claim, kept)
        rows.append((claim.says, verdict.numbers, verdict.said.value))
    report.table("Claims", HEADER, rows)
    if length.TRIAL in measured:
        sizes = length.QUICK if chosen.quick else length.STUDY
        tried = length.tried(length.trial_part(sizes, chosen.runs, chosen.data), Results(chosen.results))
        of_trial = [(str(setting), f"{rise:+.4f}") for setting, rise in length.rows_of(tried)]
        title = f"All {len(tried)} configurations that were tried, on one seed: the first one is confirmed"
        report.table(title, ("configuration", f"logarithm of the rise at {length.AT}x"), of_trial)
    page = markdown(report, f"python -m studies.again {name}")
    (output / f"{name}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
