"""The study of mixers at a size of a minute, stopped and resumed; its sizes; its page of numbers made up here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from examples.mixers.runs import QUICK, STUDY, sweep_of
from examples.mixers.study import Found, draw, main, page
from hybridtron.config.load import load
from hybridtron.planning.count import count


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_study_is_written_and_resumes(tmp_path: Path) -> None:
    arguments = ["--quick", "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"mixers.md", "mixers.png"}
    reported = (tmp_path / "out/mixers.md").read_text()
    assert "| gla | 267,680 |" in reported
    measured = sorted((tmp_path / "runs").rglob("measured.json"))
    times = [path.stat().st_mtime_ns for path in measured]
    assert len(times) == 2 + 4  # text; two lengths of rows
    assert main(arguments) == 0  # has nothing left to train or to measure
    assert [path.stat().st_mtime_ns for path in measured] == times


@pytest.mark.parametrize(("part", "runs", "parameters"), [("text", 3, 2.4e6), ("recall", 2, 0.12e6)])
def test_every_mixer_has_as_many_parameters(part: str, runs: int, parameters: float, tmp_path: Path) -> None:
    sweep, _ = sweep_of(part, STUDY, tmp_path, tmp_path)
    variants = {run.variant: run.settings for run in sweep.runs}
    assert len(sweep.runs) == runs * len(variants)
    for name, settings in variants.items():
        config = load(list(settings))
        assert count(config.model, config.phases[0].seq_len).parameters == pytest.approx(parameters, rel=0.02), name


def test_both_parts_have_the_same_mixers(tmp_path: Path) -> None:
    text, recall = ({run.variant for run in sweep_of(p, STUDY, tmp_path, tmp_path)[0].runs} for p in ("text", "recall"))
    assert text == recall
    assert {run.variant for run in sweep_of("text", QUICK, tmp_path, tmp_path)[0].runs} == set(QUICK.variants or ())


@pytest.mark.parametrize(("loss", "recalled", "reached"), [(2.2, 0.9, "yes"), (2.5, 0.004, "**no**")])
def test_the_page_names_what_learns_nothing(loss: float, recalled: float, reached: str, tmp_path: Path) -> None:
    mamba = Found(100, {1: [2.0] * 64, 2: [2.0] * 64}, [1000.0, 1000.0], {64: 1.0, 128: 0.5})
    other = Found(101, {1: [loss] * 16 + [2.0] * 48, 2: [loss] * 64}, [500.0, 510.0], {64: recalled})
    reported = page({"mamba": mamba, "other": other}, 16, ["made up"])
    rows = reported.splitlines()
    assert f"| other | 101 | {loss:.2f} ± 0.00 | {math.exp(loss):.2f} ± 0.00 |" in reported
    assert "| other | 505 | 0.51x |" in rows
    assert f"| other | {recalled:.3f} |  |" in rows
    goals = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[-1].removesuffix(" |") for row in rows[-6:]}
    assert goals["loss of other / that of mamba"] == goals["recall of other at 64 tokens"] == reached
    draw({"mamba": mamba, "other": other}, 16, tmp_path / "mixers.png")
    assert (tmp_path / "mixers.png").stat().st_size > 1000
