"""The study of joint recall at a size of a minute, stopped and resumed; its models; its page of made-up numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.tasks.options import named
from hybridtron.tasks.recall import row_length
from studies.joint_recall.order import PAPER, claims, orders, reasons
from studies.joint_recall.runs import (
    CHANCE,
    QUICK,
    ROWS,
    STUDY,
    best_rates,
    kind_of,
    rates_part,
    seeds_part,
)
from studies.joint_recall.study import main, page
from studies.results import Results
from tests.studies.quick import assert_nothing_is_left, written_quickly

SEEING_ALL = {"mamba+full", "mamba2+full"}
OTHER_BUDGETS = {"mamba+KS-8", "mamba+HAX-32"}
SHARED = {"mamba2+full-shared", "mamba2+KS-shared", "mamba2+HAX-shared"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_study_is_written_and_resumes(tmp_path: Path) -> None:
    """Three models from one seed, then two of them from two more."""
    times = written_quickly(main, tmp_path)
    assert len(times) == 3 + 2 * 2
    reported = (tmp_path / "out/joint_recall.md").read_text()
    assert_nothing_is_left(main, tmp_path, times)
    again = (tmp_path / "out/joint_recall.md").read_text().splitlines()
    rows = [line for line in reported.splitlines() if line.startswith("| mamba")]
    assert len(rows) == 3 + 1 + 1 + 3  # accuracies, a pair, the order, goals
    assert set(rows) <= set(again)


def test_variants_are_the_papers_seventeen_models_and_controls(tmp_path: Path) -> None:
    """Models as they are are twice as wide; the paper's others see 16 keys, half of them by each of two rules, with
    queries and keys of their own, which some on Mamba-2 share with the recurrence."""
    runs = rates_part(STUDY, tmp_path, tmp_path).sweep.runs
    variants = {run.variant: run for run in runs}
    paper = {f"{base}+{kind}" if kind else base for base, of in PAPER.items() for kind in of}
    assert len(paper) == 17
    assert variants.keys() == paper | SEEING_ALL | OTHER_BUDGETS | SHARED | {"samba+small-state"}
    assert len(runs) == 25 * 2
    for name, run in variants.items():
        config = load(list(run.settings))
        assert check(RunPlan.of(config)) == [], name
        sparse = config.model.layers["M"].get("sparse")
        assert config.model.width == (128 if name in ("mamba", "mamba2") else 64)
        kind = kind_of(name)[1].removesuffix("-shared")
        assert sparse is None or sparse["keys"] == {"full": 256, "KS-8": 8, "HAX-32": 32}.get(kind, 16)
        assert sparse is None or sparse.get("projected", name.startswith("mamba+")) == (name not in SHARED)
        assert [phase.seq_len - 1 for phase in config.phases] == list(ROWS)
        assert [phase.lr_piece for phase in config.phases] == ["rewarm", "carry_on", "carry_on"]


def test_rows_hold_the_largest_table() -> None:
    for length, sizes in ROWS.items():
        task = named("joint_recall", [f"sizes={sizes}", "symbols=8"])
        largest = [int(part.split("-")[1]) for part in sizes.split(",")]
        assert row_length(largest) == length
        assert task.chance() == CHANCE


def test_more_seeds_take_the_best_rate_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While some rates have not been measured, there is no best one."""
    part = rates_part(STUDY, tmp_path, tmp_path)

    class Measured:
        def __init__(self, measured: float) -> None:
            self.measured = measured

    def of(_self: Results, _name: str, _part: object, run: object) -> Measured | None:
        rate = run.values["phases.0.lr"]  # pyrefly: ignore
        if run.variant == "mamba2+KS" and rate == "1e-3":  # pyrefly: ignore
            return None
        return Measured({"1e-3": 0.2, "3e-3": 0.5}[rate])

    monkeypatch.setattr(Results, "of", of)
    best = best_rates(part, Results(tmp_path))
    assert "mamba2+KS" not in best
    assert set(best.values()) == {"3e-3"}
    seeds = seeds_part(STUDY, tmp_path, tmp_path, best).sweep.runs
    assert {run.values["run.seed"] for run in seeds} == {"2", "3"}
    assert {run.variant for run in seeds} == {
        "mamba", "mamba+SW", "mamba+KS", "mamba+HAX", "mamba2", "mamba2+SW", "mamba2+HAX",
    }  # fmt: skip
    assert {run.variant for run in rates_part(QUICK, tmp_path, tmp_path).sweep.runs} == set(QUICK.variants or ())


@pytest.mark.parametrize(("full", "base", "reached"), [(0.95, 0.3, "yes"), (0.5, 0.15, "**no**")])
def test_the_page_says_whether_the_size_keeps_models_apart(full: float, base: float, reached: str) -> None:
    accuracies = {
        "mamba": {"2e-3": [base], "4e-3": [base - 0.01]},
        "mamba+full": {"4e-3": [full]},
        "mamba+HAX": {"4e-3": [0.5, 0.6, 0.7]},
        "samba": {"4e-3": [0.13]},
    }
    rows = page(accuracies, ["made up"]).splitlines()
    assert f"| mamba | 2e-3 | 1 | {base:.2f} | {base / CHANCE:.1f}x | 16.3 |" in rows
    assert "| mamba+HAX | 4e-3 | 3 | 0.60 ± 0.10 | 4.8x | 38.0 |" in rows
    goals = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[-1].removesuffix(" |") for row in rows[-3:]}
    assert goals["mamba with attention to everything"] == reached
    wanted = [row for row in rows if row.startswith("| mamba, over chance | >=")]
    assert wanted[0].endswith(f"| {reached} |")


def test_the_papers_means_confirm_its_order() -> None:
    """And with every pair turned round in nothing."""
    means = {f"{base}+{kind}".strip("+"): value for base, of in PAPER.items() for kind, value in of.items()}
    turned = {name: 100 - value for name, value in means.items()}
    for by_name, same, said in ((means, "28 of 28", "agrees"), (turned, "0 of 28", "does not agree")):
        assert [row[-1] for row in orders(by_name)] == [same, same]
        seeds = {name: {"1": mean, "2": mean + 0.1, "3": mean - 0.1} for name, mean in by_name.items()}
        verdicts = {name: verdict for name, _, _, verdict in claims(seeds)}
        assert len(verdicts) == 10
        assert set(verdicts.values()) == {said}


def test_orders_compare_measured_models_only() -> None:
    means = {"mamba": 0.3, "mamba+KS": 0.5, "mamba+KS-8": 0.9, "mamba+LSH": 0.4}
    assert list(orders(means)) == [("mamba", "KS > alone > LSH", "KS > LSH > alone", "2 of 3")]
    seeds = {
        "mamba": {"1": 30.0, "2": 31.0, "3": 29.0},
        "mamba+KS": {"1": 50.0, "2": 52.0, "3": 48.0},
        "mamba+LSH": {"1": 40.0},
    }
    (above, alone) = claims(seeds)
    assert above[:2] == ("mamba+KS above mamba", "36.6 > 16.3")
    assert above[2].startswith("mamba below mamba+KS: 30 and 50, +20 [")
    assert above[3] == "agrees"
    one = ("mamba above mamba+LSH", "16.3 > 11.6", "mamba+LSH below mamba: 40 and 30 (one seed)", "one seed")
    assert alone == one


def test_reasons_need_all_their_measurements() -> None:
    means = {"mamba+KS-8": 0.4, "mamba+HAX": 0.45, "mamba+KS": 0.6, "mamba+HAX-32": 0.7, "mamba2+KS": 0.5}
    ((reason, shown),) = reasons(means)
    assert "short of keys" in reason
    assert shown == "mamba+KS-8 40.0, mamba+HAX 45.0, mamba+KS 60.0, mamba+HAX-32 70.0"
