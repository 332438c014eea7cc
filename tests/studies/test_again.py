"""The experiments of studies/again: their runs, the setting that a trial chooses, verdicts, and quick runs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import studies.grown.runs as grown
import studies.length_story.runs as story
import studies.span_study.runs as span
from hybridtron.data.folder import TokenFolder
from hybridtron.sweep.grid import SEED
from hybridtron.tasks.copying import END, MIDDLE, PADDING, START
from studies.again import length_parts as length
from studies.again import parts, verdicts
from studies.again.__main__ import EXPERIMENTS, main
from studies.judge import Said
from studies.long_text import Curve
from studies.papers.claim import Kept
from studies.results import ROOT, Part, Result, Results, Trained
from studies.study import Measured
from tests.data.test_folder import documents_by_streaming
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


def test_the_readme_has_the_sum_of_the_rules_hours() -> None:
    by_experiment = re.findall(r"^\| `\w+`(?:, \w+)? \| \d+ \| ([\d.]+) \|", RULES, re.MULTILINE)
    assert len(by_experiment) == len(plans())
    readme = (ROOT / "studies/again/README.md").read_text()
    assert f"- Hours: {math.fsum(map(float, by_experiment)):.1f} of one thread" in readme


@pytest.mark.parametrize(
    ("name", "part", "before"),
    [
        ("span", "span", parts.spans_before),
        ("grown", "grown", parts.grown_before),
        ("recall", parts.RECALL, parts.recall_before),
    ],
)
def test_seeds_that_judge_are_new(name: str, part: str, before: Callable[[Path, Path], Measured]) -> None:
    """Every variant has three or more, of which the earlier study has none; that study has results of the sweep."""
    known = {run.name for run, _ in before(HERE, HERE)[part]}
    planned = [run for of_name in plans()[name] for run in of_name.sweep.runs]
    assert known
    assert not known & {run.name for run in planned}
    seeds = Counter(run.variant for run in planned)
    assert min(seeds.values()) >= 3
    claimed = {variant for claim in CLAIMS[name]() for variant in claim.variants}
    assert claimed <= seeds.keys()


CLAIMS = {"span": verdicts.of_spans, "grown": verdicts.of_grown, "recall": verdicts.of_recall}


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
    further = [*ends, 256 * context]
    far = {
        "curve": {"ends": further, "perplexities": [10.0, 10.0, 10.0 * math.exp(2 * rise)]},
        "within": {"ends": further, "perplexities": [10.0, 10.0, 10.0]},
    }
    at_first = {
        "curve": {**curve, "perplexities": [12.0, 12.0 * math.exp(early)]},
        "within": {**within, "perplexities": [12.0, 12.0]},
    }
    return {
        "curve": curve,
        "within": within,
        "earlier": {"1": at_first},
        "remembrance": [[0, 9.0], [context, 1e-2 * (1 + rise)], [context + 1, 1 - rise]],
        "deviations": [[context // 2, 1e9 * (1 + rise)], [context, 1.0], [64 * context, 1 + rise]],
        "far": far,
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


def confirmed(context: int) -> Part:
    return length.confirmed_part(length.STUDY, HERE, HERE, length.Setting("state-64", "1e-3", context))


def results(rises: dict[str, float], context: int) -> Measured:
    """Results of the confirmation: a rise for each variant, with little noise over its seeds."""
    contexts = {"context-half": context // 2, "context-double": 2 * context}
    return {
        "length": [
            (run, Result(TRAINED, measured(contexts.get(run.variant, context), rise, rise / 4), 1.0, "c"))
            for run in confirmed(context).sweep.runs
            if run.variant in rises
            for rise in [rises[run.variant] * (1 + 0.01 * int(run.values[SEED]))]
        ]
    }


def said(rises: dict[str, float], context: int) -> dict[str, Said]:
    plan = {"length": confirmed(context)}
    measured = results(rises, context)
    return {claim.says: verdicts.judged(claim, measured, plan).said for claim in verdicts.of_length(context)}


@pytest.mark.parametrize("context", [32, 64])
def test_length_claims_agree_with_models_that_fail_and_are_repaired(context: int) -> None:
    fails = ("base", "zero-500", "zero-100", "warmup-25", "context-half", "sigma-3", "random-500", "fitted-500")
    rises = dict(zip(fails, (0.1, 0.1, 0.1, 0.2, 0.3, 0.4, 0.09, 0.05), strict=True))
    rises |= {"passing-500": 0.001, "tbtt-500": 0.001, "sigma-0.3": 0.02, "context-double": 0.02}
    outcomes = said(rises, context)
    of_mamba = {name: outcome for name, outcome in outcomes.items() if "mamba" in name}
    assert set(of_mamba.values()) == {Said.WAITS}
    assert {
        name: outcome for name, outcome in outcomes.items() if name not in of_mamba and outcome is not Said.AGREES
    } == {}
    assert len(outcomes) - len(of_mamba) == 9
    unrepaired = said({**rises, "passing-500": 0.1}, context)
    assert unrepaired["Figures 1, 5: passing and TBTT repair base"] is Said.NOT
    level = said(dict.fromkeys(rises, 0.0001), context)
    assert level["Figure 2: base fails beyond its context"] is Said.NO_FAILURE
    assert level["Figures 1, 5: passing and TBTT repair base"] is Said.NO_FAILURE


def test_longer_contexts_are_judged_if_any_of_the_three_fails() -> None:
    says = "Figure 2: longer contexts are better"
    level = {"context-half": 0.0001, "base": 0.0001, "context-double": 0.0001}
    assert said(level, 64)[says] is Said.NO_FAILURE
    assert said({**level, "context-double": 0.1}, 64)[says] is Said.NOT


def test_the_table_has_every_model_at_its_own_context() -> None:
    part = confirmed(32)
    variants = list(dict.fromkeys(run.variant for run in part.sweep.runs))
    measured = Kept(results(dict.fromkeys(variants, 0.1), 32), {})
    rows = {row[0]: row for row in length.confirmed_rows(length.STUDY, part, 32, measured)}
    assert list(rows) == variants
    assert {len(row) for row in rows.values()} == {len(length.confirmed_header(length.STUDY))}
    _, seeds, own, at_64, rise, at_256, far_rise = rows["context-half"]
    assert (seeds, own) == ("3", "10.00 ± 0.00")
    assert [float(cell.split()[0]) for cell in (at_64, rise)] == [11.11, 1.111]
    assert [float(cell.split()[0]) for cell in (at_256, far_rise)] == [12.34, 1.234]


def test_a_claim_waits_for_the_last_planned_seed() -> None:
    plan = {"length": confirmed(64)}
    claim = next(iter(verdicts.of_length(64)))
    every = results({"base": 0.1}, 64)["length"]
    assert verdicts.judged(claim, {"length": every}, plan).said is Said.AGREES
    waiting = verdicts.judged(claim, {"length": every[:-1]}, plan)
    assert waiting.said is Said.WAITS
    assert waiting.numbers == "no result yet of base-seed=6"
    together = verdicts.with_earlier(claim, {"length": every[:-1]}, {"length": every[-1:]})
    assert together.said is Said.AGREES


def test_keys_are_compared_seed_by_seed() -> None:
    """Seeds differ more than the two models of a seed do."""
    part = parts.keys_part(False, HERE, HERE)
    of_seeds = [0.1, 0.4, 0.5, 0.7, 0.9]
    more = {"mamba": 0.0, "mamba_fitted": 0.05}
    runs = []
    for run in part.sweep.runs:
        seed = int(run.values[SEED])
        value = of_seeds[seed - 1] + more[run.variant] + 0.001 * seed * (run.variant == "mamba")
        runs.append((run, Result(TRAINED, {"last": [{"value": value}], "rise": 1.1 + 0.001 * seed}, 1.0, "c")))
    (claim,) = verdicts.of_keys()
    assert verdicts.judged(claim, {"passkey": runs}, {"passkey": part}).said is Said.AGREES


def test_stored_keys_name_what_the_rise_was_measured_in() -> None:
    asked = parts.keys_part(False, HERE, HERE).asked
    assert (asked["rise_at"], asked["rise_rows"]) == (64, 8)


def test_rows_of_copying_end_with_the_copy(tmp_path: Path) -> None:
    """Before the string stands padding, which is not learned."""
    sizes = replace(parts.copying_sizes(False), copy_rows=200)
    story.write_copying_data(sizes, tmp_path)
    folder = TokenFolder.open(tmp_path / "strings")
    rows, masks = (documents_by_streaming(folder, "train", "copying", kind) for kind in ("tokens", "mask"))
    assert {len(row) for row in rows} == {parts.COPY_ROW}
    lengths = Counter()
    for row, mask in zip(rows, masks, strict=True):
        start = row.index(START)
        middle = row.index(MIDDLE)
        letters = middle - start - 1
        assert row[:start] == [PADDING] * (parts.COPY_ROW - 2 * letters - 4)
        assert row[middle + 1 :] == [*row[start + 1 : middle], END, story.END]
        assert mask == [0] * (middle + 1) + [1] * (letters + 1) + [0]
        lengths[letters] += 1
    assert set(lengths) == set(range(10, 21))


def copied(zero: float, passing: float) -> Said:
    part = story.part_of("copying", parts.copying_sizes(False), HERE)
    values = {"zero": zero, "passing": passing}
    runs = [
        (run, Result(TRAINED, {"60": values[run.variant] + 0.01 * int(run.values[SEED])}, 1.0, "c"))
        for run in part.sweep.runs
    ]
    (claim,) = verdicts.of_copying()
    return verdicts.judged(claim, {"copying": runs}, {"copying": part}).said


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
    if name == "length":
        every = [json.loads(path.read_text())["found"]["deviations"] for path in times]
        assert {deviations[0][0] for deviations in every} <= {32, 64}, "the context is the first position"
        assert all(deviations[1][0] == 2 * deviations[0][0] for deviations in every)
    assert_nothing_is_left(run, tmp_path, times)


def test_curves_of_this_test_rise_as_they_should() -> None:
    assert length.risen(64, 64, measured(64, 0.05)) == pytest.approx(0.05)
    assert Curve(**measured(32, 0.1)["curve"]).near(64 * 32) == pytest.approx(10 * math.exp(0.1))
