"""The studies that claims are judged from: their runs, planned minutes, data, and folders of results.

They are listed by importance, and carried out in that order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import studies.grown.runs as grown
import studies.joint_recall.runs as joint_recall
import studies.length_story.runs as length_story
import studies.papers.babilong_runs as babilong
import studies.papers.length_runs as length
import studies.papers.samba_runs as samba
import studies.passkey.samples as passkey
import studies.span_study.runs as span_study
from hybridtron.sweep.grid import SweepRun
from studies.papers.claim import Kept
from studies.papers.speed import kept_in
from studies.results import ROOT, Results, results_of
from studies.study import Plan, found_in

PACKAGES = ("torch", "transformers", "sympy")


@dataclass(frozen=True)
class Where:
    """A call's folders for runs and results, and a flag for the quick sizes.

    Without a folder for results each study keeps its own.
    """

    runs: Path
    results: Path | None
    quick: bool

    def data(self, name: str) -> Path:
        if self.quick:
            return self.runs / "data" / name
        return ROOT / "data" / name

    def of(self, name: str) -> Path:
        return self.runs / name

    def kept(self, study: str) -> Path:
        """Return the folder with a study's results."""
        if self.results is None:
            return results_of(study)
        return self.results / study


@dataclass(frozen=True)
class Study:
    """A set of sweeps with its data.

    `usual` estimates a run's minutes until a run of its variant is known, and `minutes_by_variant` those of exceptions.
    `results` is a folder's name.
    """

    results: str
    plan: Callable[[Where], Plan]
    prepare: Callable[[Where], None]
    usual: float
    minutes_by_variant: Mapping[str, float] = field(default_factory=dict)

    def minutes(self, variant: str) -> float:
        return self.minutes_by_variant.get(variant, self.usual)

    def kept(self, where: Where) -> Results:
        return Results(where.kept(self.results))


CORPORA = {"samba": "papers", "tables": "papers", "entropy": "papers", "length": "papers-512"}
"""The folder of each sweep's text; the smallest models have a smaller vocabulary."""


def of_papers(part: str, where: Where) -> Plan:
    """Plan a sweep of this folder."""
    data = where.data(CORPORA[part])
    if part == "length":
        return {part: length.part_of(length.sizes_of(where.quick), where.of("papers"), data)}
    return {part: samba.part_of(part, samba.sizes_of(where.quick), where.of("papers"), data)}


def write_corpus(part: str, where: Where) -> None:
    """Write the text of a sweep: the standard library and sources of installed packages, split by file.

    It is long enough that no run reads more than once through it.
    """
    from hybridtron.data.prepare.embedded import prepare_embedded

    size = samba.sizes_of(where.quick).vocab_size
    if part == "length":
        size = length.sizes_of(where.quick).vocab_size
    packages = PACKAGES
    if where.quick:
        packages = ()
    prepare_embedded(where.data(CORPORA[part]), size, packages)


def of_passkey(where: Where) -> Plan:
    sizes = passkey.sizes_of(where.quick)
    return {"passkey": passkey.part_of(sizes, where.of("passkey"), where.data("passkey"))}


def of_story(where: Where) -> Plan:
    sizes = length_story.sizes_of(where.quick)
    return {part: length_story.part_of(part, sizes, where.of("length_story")) for part in ("language", "copying")}


def of_recall(where: Where) -> Plan:
    """Plan joint recall: all rates of the first seed, and further seeds of variants whose rates are all measured."""
    sizes = joint_recall.sizes_of(where.quick)
    runs = where.of("joint_recall")
    data = where.data("joint_recall")
    rates = joint_recall.rates_part(sizes, runs, data)
    best = joint_recall.best_rates(rates, Results(where.kept("joint_recall")))
    return {"rates": rates, "seeds": joint_recall.seeds_part(sizes, runs, data, best)}


def of_grown(where: Where) -> Plan:
    sizes = grown.sizes_of(where.quick)
    return {"grown": grown.part_of(sizes, where.of("grown"), where.data("grown"))}


def of_span(where: Where) -> Plan:
    sizes = span_study.sizes_of(where.quick)
    return {"span": span_study.part_of(sizes, where.of("span_study"), where.data("span_study"))}


def of_babilong(where: Where) -> Plan:
    sizes = babilong.sizes_of(where.quick)
    return {"babilong": babilong.part_of(sizes, where.of("papers/babilong"), where.data("babilong"))}


def write_babilong(where: Where) -> None:
    babilong.write_stories(babilong.sizes_of(where.quick), where.data("babilong"))


def write_passkey(where: Where) -> None:
    passkey.write_samples(passkey.sizes_of(where.quick), where.data("passkey"))


def write_story(where: Where) -> None:
    length_story.write_copying_data(length_story.sizes_of(where.quick), where.of("length_story"))


def write_recall(where: Where) -> None:
    joint_recall.write_rows(joint_recall.sizes_of(where.quick), where.data("joint_recall"))


def write_grown(where: Where) -> None:
    grown.write_samples(grown.sizes_of(where.quick), where.data("grown"))


def write_span(where: Where) -> None:
    span_study.write_rows(span_study.sizes_of(where.quick), where.data("span_study"))


MINUTES_OF_LENGTH = {**dict.fromkeys(length.BASES, 15.0), length.LONGER: 15 * length.TIMES}
STUDIES = (
    Study("papers", partial(of_papers, "samba"), partial(write_corpus, "samba"), usual=16),
    Study(
        "papers",
        partial(of_papers, "length"),
        partial(write_corpus, "length"),
        usual=1.5,
        minutes_by_variant=MINUTES_OF_LENGTH,
    ),
    Study("passkey", of_passkey, write_passkey, usual=14, minutes_by_variant={passkey.LONGER: 24}),
    Study("papers", partial(of_papers, "tables"), partial(write_corpus, "tables"), usual=8),
    Study("papers", of_babilong, write_babilong, usual=4, minutes_by_variant={"passing": 1}),
    Study("papers", partial(of_papers, "entropy"), partial(write_corpus, "entropy"), usual=6),
    Study("joint_recall", of_recall, write_recall, usual=6),
    Study("span_study", of_span, write_span, usual=1.5),
    Study("grown", of_grown, write_grown, usual=5),
    Study("length_story", of_story, write_story, usual=1, minutes_by_variant={"zero": 8, "passing": 8}),
)
SPEED_MINUTES = 15.0  # planned for all measurements of speed


def all_kept(where: Where) -> Kept:
    """Read all stored results."""
    measured = {}
    for study in STUDIES:
        measured |= found_in(study.plan(where), study.kept(where))
    return Kept(measured, kept_in(where.kept("papers")))


def planned(study: Study, part: str, run: SweepRun, kept: Kept) -> float:
    """Return the planned minutes of a run: the mean of its variant's other runs, or else the study's estimate."""
    known = [result.minutes for result in kept.results(part, run.variant)]
    if not known:
        return study.minutes(run.variant)
    return statistics.mean(known)
