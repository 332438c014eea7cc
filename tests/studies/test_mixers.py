"""The study of mixers at a size of a minute, stopped and resumed; its sizes; its page of numbers made up here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.planning.count import count
from hybridtron.proving.measuring import Timing
from studies.long_text import Curve
from studies.mixers.runs import QUICK, STUDY, part_of
from studies.mixers.study import Found, draw, main, page
from tests.studies.quick import assert_nothing_is_left, written_quickly


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_study_is_written_and_resumes(tmp_path: Path) -> None:
    times = written_quickly(main, tmp_path)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"mixers.md", "mixers.png"}
    reported = (tmp_path / "out/mixers.md").read_text()
    assert "| gla | 267,680 |" in reported
    assert len(times) == 2 + 4  # text; two lengths of rows
    assert_nothing_is_left(main, tmp_path, times)
    assert not (tmp_path / "elsewhere/text").exists()
    again = (tmp_path / "out/mixers.md").read_text()
    assert "results of earlier runs, by commits: " in again
    rows = [line for line in reported.splitlines() if line.startswith("| mamba | ")]
    assert rows[0] in again  # but not the times of a step


@pytest.mark.parametrize(("part", "runs", "parameters"), [("text", 3, 2.4e6), ("recall", 2, 0.12e6)])
def test_every_mixer_has_as_many_parameters(part: str, runs: int, parameters: float, tmp_path: Path) -> None:
    sweep = part_of(part, STUDY, tmp_path, tmp_path).sweep
    variants = {run.variant: run.settings for run in sweep.runs}
    assert len(sweep.runs) == runs * len(variants)
    for name, settings in variants.items():
        config = load(list(settings))
        assert count(architecture(config.model), config.phases[0].seq_len).parameters == pytest.approx(
            parameters, rel=0.02
        ), name


def test_both_parts_have_the_same_mixers(tmp_path: Path) -> None:
    parts = (part_of(part, STUDY, tmp_path, tmp_path) for part in ("text", "recall"))
    text, recall = ({run.variant for run in part.sweep.runs} for part in parts)
    assert text == recall
    assert {run.variant for run in part_of("text", QUICK, tmp_path, tmp_path).sweep.runs} == set(QUICK.variants or ())


@pytest.mark.parametrize(("loss", "recalled", "reached"), [(2.2, 0.9, "yes"), (2.5, 0.004, "**no**")])
def test_the_page_names_mixers_that_learn_nothing(loss: float, recalled: float, reached: str, tmp_path: Path) -> None:
    curve = Curve.of([loss] * 16 + [2.0] * 48, 16)
    mamba = Found(100, {1: 2.0, 2: 2.0}, {1: curve, 2: curve}, {64: 1.0, 128: 0.5}, Timing((0.5, 0.6)))
    other = Found(101, {1: loss, 2: loss}, {1: curve, 2: curve}, {64: recalled}, Timing((1.0, 1.5, 1.25)))
    reported = page({"mamba": mamba, "other": other}, 16, ["made up"])
    rows = reported.splitlines()
    assert f"| other | 101 | {loss:.2f} ± 0.00 | {math.exp(loss):.2f} ± 0.00 |" in reported
    assert "| other | 2.00x | +25% |" in rows
    assert f"| other | {recalled:.3f} |  |" in rows
    goals = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[-1].removesuffix(" |") for row in rows[-6:]}
    assert goals["loss of other / that of mamba"] == goals["recall of other at 64 tokens"] == reached
    draw({"mamba": mamba, "other": other}, 16, tmp_path / "mixers.png")
    assert (tmp_path / "mixers.png").stat().st_size > 1000
