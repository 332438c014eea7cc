"""The study of experts at a size of a minute, stopped and resumed; its runs; its page of made-up numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.count import count
from studies.experts.runs import DENSE, QUICK, ROUTED, STUDY, averaged, final_load, part_of
from studies.experts.study import NAMES, draw, judged, main
from studies.judge import Said
from tests.studies.quick import assert_nothing_is_left, written_quickly

CURVE = [[10.0, 3.0, 2.0], [20.0, 1.2, 1.4]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_study_is_written_and_resumes(tmp_path: Path) -> None:
    times = written_quickly(main, tmp_path, "--jobs", "1")
    assert len(times) == len(NAMES) * len(QUICK.seeds)
    reported = (tmp_path / "out/experts.md").read_text()
    assert (tmp_path / "out/experts.png").stat().st_size > 1000
    assert reported.count("too few seeds") >= 3
    assert_nothing_is_left(main, tmp_path, times, "--jobs", "1")


def test_models_have_equal_flops_a_token_and_differ_in_their_mlps_only() -> None:
    runs = part_of(STUDY, Path("runs")).sweep.runs
    assert list(dict.fromkeys(run.variant for run in runs)) == [DENSE, *ROUTED] == list(NAMES)
    flops = {}
    for run in runs[::3]:
        config = load(list(run.settings))
        assert check(RunPlan.of(config)) == []
        flops[run.variant] = count(architecture(config.model), 256).flops_per_token
    assert len(flops) == 3
    assert max(flops.values()) == pytest.approx(min(flops.values()), rel=0.01)


def test_loads_are_averaged_over_steps() -> None:
    steps = [(step, [float(step), 2.0]) for step in range(1, 6)]
    assert averaged(steps, 2) == [[2.0, 1.5, 2.0], [4.0, 3.5, 2.0], [5.0, 5.0, 2.0]]
    assert final_load(CURVE) == 1.4


def test_claims_are_judged_by_three_seeds(tmp_path: Path) -> None:
    losses = {DENSE: 3.0, "auxiliary": 2.9, "bias": 3.1}
    found: dict[str, dict[str, Any]] = {
        variant: {
            seed: {"loss": loss + 0.001 * int(seed), "loads": CURVE if variant in ROUTED else []} for seed in "123"
        }
        for variant, loss in losses.items()
    }
    for seed in "123":
        last = 1.4 + 0.01 * int(seed)
        found["bias"][seed]["loads"] = [*CURVE, [30.0, 1.1, last]]
    outcomes = [verdict.said for verdict in judged(found).values()]
    assert outcomes == [Said.AGREES, Said.NOT, Said.AGREES]
    draw(found, tmp_path / "experts.png")
    assert (tmp_path / "experts.png").stat().st_size > 1000
    one_seed = {variant: {"1": of_seeds["1"]} for variant, of_seeds in found.items()}
    assert {verdict.said for verdict in judged(one_seed).values()} == {Said.ONE_SEED}
