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
from studies.judge import Said
from studies.judge import notes as judged_by
from studies.papers.claim import Kept
from studies.results import Results, results_of
from studies.study import Measured, Plan, conduct, parse

HEADER = ("claim", "ours", "verdict")
Shown = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]
"""A table that decides nothing: title, header and rows."""


def nothing(kept: Kept) -> Iterator[Shown]:
    """Yield no tables."""
    return iter(())


@dataclass(frozen=True)
class Experiment:
    """Runs, their data, and the claims that their results decide.

    before: results of another study, whose seeds were known when the rules were written
    tables: further tables of the page
    """

    title: str
    prepare: Callable[[], None]
    plan: Callable[[], Plan]
    claims: Callable[[], Iterator[verdicts.Claim]]
    before: Measured = field(default_factory=dict)
    tables: Callable[[Kept], Iterator[Shown]] = nothing


def main(arguments: list[str]) -> int:
    """Train the missing runs of an experiment, measure them, and write its page. Returns the exit code."""
    name, chosen = parsed(arguments)
    experiment = EXPERIMENTS[name](chosen)
    if not chosen.measure:
        experiment.prepare()
    while True:
        known = set(experiment.plan())
        code = conduct(chosen, experiment.plan, partial(write, name, experiment))
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

    def tables(measured: Kept) -> Iterator[Shown]:
        tried = length.tried(trial, kept)
        title = f"All {len(tried)} configurations that were tried, on one seed: the first one is confirmed"
        yield title, ("configuration", f"logarithm of the rise at {length.AT}x"), length.trial_rows(tried)
        if setting := length.chosen(trial, kept):
            part = length.confirmed_part(sizes, chosen.runs, chosen.data, setting)
            rows = list(length.confirmed_rows(sizes, part, setting.context, measured))
            yield "Perplexity of all models, by contexts into the text", length.confirmed_header(sizes), rows

    return Experiment(
        "Length generalization",
        lambda: length.write_text(sizes, chosen.data),
        lambda: length.planned(sizes, chosen.runs, chosen.data, kept),
        claims,
        tables=tables,
    )


def of_copying(chosen: argparse.Namespace) -> Experiment:
    sizes = parts.copying_sizes(chosen.quick)
    return Experiment(
        "Copying in rows of one string",
        lambda: story.write_copying_data(sizes, chosen.runs),
        lambda: {"copying": story.part_of("copying", sizes, chosen.runs)},
        verdicts.of_copying,
    )


def of_span(chosen: argparse.Namespace) -> Experiment:
    sizes = parts.span_sizes(chosen.quick)
    return Experiment(
        "Spans with seven new seeds",
        lambda: span.write_rows(sizes, chosen.data),
        lambda: {"span": span.part_of(sizes, chosen.runs, chosen.data)},
        verdicts.of_spans,
        earlier(chosen, parts.spans_before),
    )


def of_grown(chosen: argparse.Namespace) -> Experiment:
    sizes = parts.grown_sizes(chosen.quick)
    return Experiment(
        "HAX grown, five new seeds",
        lambda: grown.write_samples(sizes, chosen.data),
        lambda: {"grown": grown.part_of(sizes, chosen.runs, chosen.data)},
        verdicts.of_grown,
        earlier(chosen, parts.grown_before),
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
    return Experiment(
        "Joint recall with new seeds",
        lambda: recall.write_rows(parts.recall_sizes(chosen.quick), chosen.data),
        lambda: parts.recall_plan(chosen.quick, chosen.runs, chosen.data),
        verdicts.of_recall,
        earlier(chosen, parts.recall_before),
    )


def earlier(chosen: argparse.Namespace, read: Callable[[Path, Path], Measured]) -> Measured:
    """Read another study's results; a quick experiment's models are not comparable with them."""
    if chosen.quick:
        return {}
    return read(chosen.runs, chosen.data)


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
    measured: Measured,
    more: list[str],
    output: Path,
) -> None:
    """Write the page: verdicts, the same with earlier seeds, and the experiment's own tables."""
    minutes = sum(result.minutes for part in measured.values() for _, result in part)
    count = sum(map(len, measured.values()))
    notes = [
        "rules, written before the first run: [rules.md](rules.md)",
        f"{count} runs, {minutes / 60:.1f} hours of steps",
    ]
    report = BenchReport(experiment.title, notes=[*notes, *judged_by(), *more])
    plan = experiment.plan()
    rows = []
    together = []
    for claim in experiment.claims():
        verdict = verdicts.judged(claim, measured, plan)
        rows.append((claim.says, verdict.numbers, verdict.said.value))
        if experiment.before and verdict.said is not Said.WAITS:
            verdict = verdicts.with_earlier(claim, measured, experiment.before)
            together.append((claim.says, verdict.numbers, verdict.said.value))
    report.table("Claims", HEADER, rows)
    if together:
        report.table("The same with the earlier study's seeds, which decide nothing", HEADER, together)
    for title, header, cells in experiment.tables(Kept(measured, {})):
        report.table(title, header, cells)
    page = markdown(report, f"python -m studies.again {name}")
    (output / f"{name}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
