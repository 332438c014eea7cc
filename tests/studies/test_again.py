"""The experiments of studies/again: their runs, the setting that a trial chooses, verdicts, and quick runs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import studies.grown.runs as grown
import studies.length_story.runs as story
import studies.span_study.runs as span
from hybridtron.sweep.grid import SEED
from studies.again import length_parts as length
from studies.again import parts, verdicts
from studies.again.__main__ import EXPERIMENTS, main
from studies.judge import Said
from studies.long_text import Curve
from studies.papers.claim import Kept
from studies.results import ROOT, Part, Result, Results, Trained
from studies.study import Measured
from tests.studies.quick import assert_nothing_is_left, written_quickly
from tests.studies.test_results import SHAPE

HERE = Path("runs")
RULES = (ROOT / "studies/again/rules.md").read_text()
TRAINED = Trained.read({**SHAPE, "phases": []})


def plans() -> dict[str, list[Part]]:
    trial = length.trial_part(length.STUDY, HERE, HERE)
    setting = length.Setting.of(trial.sweep.runs[-1])
    return {
        "length, trial": [trial],
        "length, confirmation": [length.confirmed_part(length.STUDY, HERE, HERE, setting)],
        "copying": [story.part_of("copying", parts.copying_sizes(False), HERE)],
        "span": [span.part_of(parts.span_sizes(False), HERE, HERE)],
        "grown": [grown.part_of(parts.grown_sizes(False), HERE, HERE)],
        "keys": [parts.keys_part(False, HERE, HERE)],
        "recall": list(parts.recall_plan(False, HERE, HERE).values()),
    }


def test_rules_name_every_experiment_with_its_number_of_runs() -> None:
    for name, of_name in plans().items():
        experiment, _, stage = name.partition(", ")
        row = re.search(rf"^\| `{experiment}`(?:, {stage or 'none'})? \| (\d+) \|", RULES, re.MULTILINE)
        assert row, name
        if stage:
            row = re.search(rf"^\| `{experiment}`, {stage} \| (\d+) \|", RULES, re.MULTILINE)
        assert row
        assert int(row[1]) == sum(len(part.sweep.runs) for part in of_name), name
    assert {name.partition(",")[0] for name in plans()} == set(EXPERIMENTS)


def test_a_setting_is_confirmed_on_seeds_that_the_trial_has_not() -> None:
    planned = plans()
    tried, confirmed = (
        {run.values[SEED] for part in planned[name] for run in part.sweep.runs}
        for name in ("length, trial", "length, confirmation")
    )
    assert not tried & confirmed
    assert len(confirmed) >= 3


def test_runs_of_the_confirmation_have_the_found_setting() -> None:
    trial = length.trial_part(length.STUDY, HERE, HERE)
    setting = length.Setting("state-256", "2e-3", 32)
    part = length.confirmed_part(length.STUDY, HERE, HERE, setting)
    assert setting in [length.Setting.of(run) for run in trial.sweep.runs]
    by_variant = {run.variant: run.settings for run in part.sweep.runs}
    for variant, context in (("base", 32), ("context-half", 16), ("context-double", 64), ("warmup-25", 32)):
        settings = by_variant[variant]
        assert "phases.0.lr=2e-3" in settings
        assert f"phases.0.seq_len={context}" in settings
        assert f"phases.0.global_batch={4096 // context}" in settings
        assert any("state: 256" in text for text in settings)
    assert "phases.0.seq_len=64" in by_variant["mamba"]
    assert not any(text.startswith("phases.0.lr") for text in by_variant["mamba"])


def measured(context: int, rise: float, early: float = 0.0) -> dict[str, Any]:
    """A model whose perplexity beyond its context is exp(rise) times that of the same tokens within one."""
    ends = [context, 64 * context]
    within = {"ends": ends, "perplexities": [10.0, 10.0]}
    curve = {"ends": ends, "perplexities": [10.0, 10.0 * math.exp(rise)]}
    at_first = {
        "curve": {**curve, "perplexities": [12.0, 12.0 * math.exp(early)]},
        "within": {**within, "perplexities": [12.0, 12.0]},
    }
    return {
        "curve": curve,
        "within": within,
        "earlier": {"1": at_first},
        "remembrance": [[context // 2, 1e-2 * (1 + rise)]],
        "deviations": [[context, 1.0], [64 * context, 1 + rise]],
    }


def test_the_trial_chooses_what_rises_most_once_it_is_complete(tmp_path: Path) -> None:
    sizes = replace(length.STUDY, trial=(("state-64", "1e-3", "32"), ("state-64", "2e-3", "64")))
    trial = length.trial_part(sizes, tmp_path, tmp_path)
    results = Results(tmp_path / "results")
    (tmp_path / "results").mkdir()
    for run, rise in zip(trial.sweep.runs, (0.01, 0.05), strict=True):
        assert length.chosen(trial, results) is None
        about = {"trained": {**SHAPE, "phases": []}, "found": measured(length.Setting.of(run).context, rise)}
        record = {**trial.identity(run), **about, "minutes": 1, "commit": "c"}
        results.path(length.TRIAL, trial, run).write_text(json.dumps(record))
    assert str(length.chosen(trial, results)) == "state-64, rate 2e-3, context 64"
    assert set(length.planned(sizes, tmp_path, tmp_path, results)) == {length.TRIAL, length.CONFIRMED}


def kept(rises: dict[str, float], context: int) -> Kept:
    """Results of the confirmation: a rise for each variant, with little noise over its seeds."""
    part = length.confirmed_part(length.STUDY, HERE, HERE, length.Setting("state-64", "1e-3", context))
    contexts = {"context-half": context // 2, "context-double": 2 * context}
    runs: Measured = {
        "length": [
            (run, Result(TRAINED, measured(contexts.get(run.variant, context), rise, rise / 4), 1.0, "c"))
            for run in part.sweep.runs
            if run.variant in rises
            for rise in [rises[run.variant] * (1 + 0.01 * int(run.values[SEED]))]
        ]
    }
    return Kept(runs, {})


def said(rises: dict[str, float]) -> dict[str, Said]:
    return {claim.says: verdicts.judged(claim, kept(rises, 64)).said for claim in verdicts.of_length(64)}


def test_length_claims_agree_with_models_that_fail_and_are_repaired() -> None:
    fails = ("base", "zero-500", "zero-100", "warmup-25", "context-half", "sigma-3", "random-500", "fitted-500")
    rises = dict(zip(fails, (0.1, 0.1, 0.1, 0.2, 0.3, 0.4, 0.09, 0.05), strict=True))
    rises |= {"passing-500": 0.001, "tbtt-500": 0.001, "sigma-0.3": 0.02, "context-double": 0.02}
    outcomes = said(rises)
    of_mamba = {name: outcome for name, outcome in outcomes.items() if "mamba" in name}
    assert set(of_mamba.values()) == {Said.WAITS}
    assert {
        name: outcome for name, outcome in outcomes.items() if name not in of_mamba and outcome is not Said.AGREES
    } == {}
    assert len(outcomes) - len(of_mamba) == 9
    unrepaired = said({**rises, "passing-500": 0.1})
    assert unrepaired["Figures 1, 5: passing and TBTT repair base"] is Said.NOT
    level = said(dict.fromkeys(rises, 0.0001))
    assert level["Figure 2: base fails beyond its context"] is Said.NO_FAILURE
    assert level["Figures 1, 5: passing and TBTT repair base"] is Said.NO_FAILURE


def copied(zero: float, passing: float) -> Said:
    part = story.part_of("copying", parts.copying_sizes(False), HERE)
    values = {"zero": zero, "passing": passing}
    runs = [
        (run, Result(TRAINED, {"60": values[run.variant] + 0.01 * int(run.values[SEED])}, 1.0, "c"))
        for run in part.sweep.runs
    ]
    (claim,) = verdicts.of_copying()
    return verdicts.judged(claim, Kept({"copying": runs}, {})).said


def test_copying_is_decided_only_if_zero_states_fail() -> None:
    assert copied(0.1, 0.4) is Said.AGREES
    assert copied(0.4, 0.1) is Said.NOT
    assert copied(0.9, 0.5) is Said.NO_FAILURE
    assert copied(0.2, 0.205) is Said.UNDECIDED


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_quick_experiment_is_written_and_resumes(name: str, tmp_path: Path) -> None:
    run = partial(lambda arguments: main([name, *arguments]))
    times = written_quickly(run, tmp_path)
    assert "## Claims" in (tmp_path / f"out/{name}.md").read_text()
    assert_nothing_is_left(run, tmp_path, times)


def test_curves_of_this_test_rise_as_they_should() -> None:
    assert length.risen(64, 64, measured(64, 0.05)) == pytest.approx(0.05)
    assert Curve(**measured(32, 0.1)["curve"]).near(64 * 32) == pytest.approx(10 * math.exp(0.1))
