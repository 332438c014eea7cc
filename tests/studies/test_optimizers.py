"""The study of optimizers at a size of minutes, stopped and resumed; its rates; its page of made-up numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.count import count
from hybridtron.sweep.grid import read
from studies.optimizers.runs import (
    HERE,
    LADDER,
    OPTIMIZERS,
    QUICK,
    RATE,
    STUDY,
    planned,
    rates_to_try,
    settings_of,
    shortened,
    steps_of,
    variants,
)
from studies.optimizers.study import ModelResults, draw, main, page
from studies.results import Results
from studies.welch import of_two, quantile, two_sided
from tests.studies.quick import assert_nothing_is_left, written_quickly


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_quick_study_is_written_and_resumes(tmp_path: Path) -> None:
    """After four steps, the highest rate is the best: each optimizer gets the third, and then two seeds there."""
    times = written_quickly(main, tmp_path, "--jobs", "1")
    assert sorted(path.name.partition("-")[0] for path in times) == [
        *["rates"] * 6,
        "speed",
        *["time"] * 2,
        *["tokens"] * 4,
    ]
    reported = (tmp_path / "out/optimizers.md").read_text()
    assert (tmp_path / "out/optimizers.png").stat().st_size > 1000
    assert "| mamba2 | Muon | " in reported
    assert_nothing_is_left(main, tmp_path, times, "--jobs", "1")
    rows = [line for line in reported.splitlines() if line.startswith("| mamba2")]
    assert len(rows) == 2 + 1 + 2  # comparisons, times, rates
    assert set(rows) <= set((tmp_path / "out/optimizers.md").read_text().splitlines())


def test_models_have_2_4_million_parameters_and_differ_in_the_optimizer_only() -> None:
    sweep = read(HERE / "optimizers.yaml")
    assert list(dict.fromkeys(run.variant for run in sweep.runs)) == variants(STUDY)
    assert tuple(dict.fromkeys(run.values[RATE] for run in sweep.runs)) == LADDER
    for model in STUDY.models:
        adamw, muon = (settings_of(STUDY, model, optimizer) for optimizer in OPTIMIZERS)
        assert set(adamw) ^ set(muon) == {"optim.name=adamw", "optim.name=muon"}
        config = load(list(muon))
        assert check(RunPlan.of(config)) == []
        parameters = count(architecture(config.model), config.phases[0].seq_len).parameters
        assert parameters == pytest.approx(2.4e6, rel=0.02)
        assert steps_of(STUDY, model) == 489


def test_rates_are_tried_until_both_optimizers_have_their_best_inside() -> None:
    def tried(**best: str) -> dict[str, tuple[str, ...]]:
        """The rates of an optimizer whose loss grows with the distance from its best rate."""
        losses = {
            name: {rate: abs(LADDER.index(rate) - LADDER.index(best[name])) + 1.0 for rate in LADDER}
            for name in OPTIMIZERS
        }
        return rates_to_try(losses, STUDY)

    assert rates_to_try({"adamw": {}, "muon": {}}, STUDY) == dict.fromkeys(OPTIMIZERS, LADDER[2:6])
    assert tried(adamw="3e-3", muon="6e-3") == dict.fromkeys(OPTIMIZERS, LADDER[2:6])
    assert tried(adamw="3e-3", muon="1.2e-2") == {"adamw": LADDER[1:6], "muon": LADDER[2:7]}
    assert tried(adamw="7.5e-4", muon="6e-3") == {"adamw": LADDER[0:6], "muon": LADDER[2:8]}
    assert tried(adamw="4.8e-2", muon="3e-3") == dict.fromkeys(OPTIMIZERS, LADDER)
    some = {"adamw": {rate: float(rate) for rate in LADDER[2:6]}, "muon": dict.fromkeys(LADDER[2:5], 1.0)}
    assert rates_to_try(some, STUDY)["adamw"] == LADDER[2:6]  # as one run of Muon has no result


def test_seeds_follow_at_the_best_rates_and_in_the_time_of_the_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measured:
        def __init__(self, measured: float) -> None:
            self.measured = measured

    def of(_self: Results, name: str, _part: object, run: object) -> Measured | None:
        best = 3e-3
        if run.variant == "samba-muon":  # pyrefly: ignore
            best = 6e-3
        if name != "rates" or run.variant == "mamba2-adamw":  # pyrefly: ignore
            return None
        return Measured(abs(float(run.values[RATE]) - best))  # pyrefly: ignore

    monkeypatch.setattr(Results, "of", of)
    for model in STUDY.models:
        (tmp_path / f"speed-{model}.json").write_text(
            '{"seconds": {"adamw": [1.0, 9.0, 1.1], "muon": [1.25, 0.1, 1.375]}}'
        )
    plan = planned(STUDY, tmp_path, tmp_path)
    assert len(plan["rates"].sweep.runs) == 6 * 4
    names = {run.name for run in plan["tokens"].sweep.runs}
    assert {name for name in names if name.startswith("samba")} == {
        *(f"samba-adamw-lr=3e-3-seed={seed}" for seed in (2, 3, 4)),
        *(f"samba-muon-lr=6e-3-seed={seed}" for seed in (2, 3, 4)),
    }
    assert not any(name.startswith("mamba2") for name in names)
    at_equal_time = plan["time"].sweep.runs
    assert {run.variant for run in at_equal_time} == {"samba-muon", "gdn_hybrid-muon"}
    assert {run.settings[-1] for run in at_equal_time} == {f"phases.0.tokens=${{steps:{round(489 * 1.1 / 1.25)}}}"}
    assert RunPlan.of(load(list(at_equal_time[0].settings))).last_step == round(489 * 1.1 / 1.25)


def test_the_slower_optimizer_has_fewer_steps() -> None:
    assert shortened(100, {"adamw": 1.0, "muon": 1.25}) == ("muon", 80)
    assert shortened(100, {"adamw": 2.0, "muon": 1.0}) == ("adamw", 50)


@pytest.mark.parametrize(("freedom", "critical"), [(2, 4.302653), (2.5, 3.575), (4, 2.776445), (30, 2.042272)])
def test_critical_values_of_students_distribution(freedom: float, critical: float) -> None:
    assert two_sided(critical, freedom) == pytest.approx(0.05, abs=1e-4)
    assert two_sided(-critical, freedom) == two_sided(critical, freedom)
    assert quantile(0.05, freedom) == pytest.approx(critical, abs=2e-3)


def test_welch_of_a_textbook_sample() -> None:
    """With variances of 1 and 4: an error of sqrt(5 / 3), and 25 / 8.5 degrees of freedom."""
    result = of_two([9.0, 10.0, 11.0], [3.0, 5.0, 7.0])
    assert result.mean == 5.0
    assert result.error == pytest.approx((5 / 3) ** 0.5)
    assert result.freedom == pytest.approx(25 / 8.5)
    assert result.p() == pytest.approx(0.0316, abs=5e-4)


def made_up(muon: tuple[float, ...]) -> Mapping[str, ModelResults]:
    by_rate = {"1.5e-3": 3.4, "3e-3": 3.3, "6e-3": 3.5}
    adamw = {"2": 3.3, "3": 3.31, "4": 3.32}
    results = ModelResults(2_400_000, 489)
    results.rates = {"adamw": by_rate, "muon": {**by_rate, "6e-3": 3.2}}
    results.tokens = {"adamw": adamw, "muon": dict(zip("234", muon, strict=True))}
    results.time = {"adamw": adamw}  # Muon's shorter runs have not finished
    results.medians = {"adamw": 0.5, "muon": 0.6}
    results.time_steps = {"adamw": 489, "muon": 408}
    return {"samba": results}


@pytest.mark.parametrize(
    ("muon", "difference", "better"),
    [
        ((3.2, 3.21, 3.22), "-0.1000 ± 0.0082", "Muon"),
        ((3.4, 3.41, 3.42), "+0.1000 ± 0.0082", "AdamW"),
        ((3.2, 3.3, 3.4), "-0.0100 ± 0.0580", "no difference seen"),
    ],
)
def test_the_page_names_the_better_optimizer(
    muon: tuple[float, ...], difference: str, better: str, tmp_path: Path
) -> None:
    rows = page(made_up(muon), ["made up"]).splitlines()
    compared_rows = [row for row in rows if " | 3.3100 ± 0.0100 | " in row]
    assert len(compared_rows) == 1  # at equal time there is nothing to compare yet
    assert f" | {difference} | " in compared_rows[0]
    assert compared_rows[0].endswith(f" | {better} |")
    assert "| samba | 2,400,000 | 1.200 | 489 | 408 |" in rows
    assert "| samba | AdamW | 3.4000 | 3.3000 | 3.5000 | 3e-3 | yes |" in rows
    assert "| samba | Muon | 3.4000 | 3.3000 | 3.2000 | 6e-3 | **no** |" in rows
    draw(made_up(muon), tmp_path / "optimizers.png")
    assert (tmp_path / "optimizers.png").stat().st_size > 1000


def test_quick_rates_are_part_of_the_study() -> None:
    assert set(QUICK.first_rates) < set(QUICK.ladder) < set(LADDER)
