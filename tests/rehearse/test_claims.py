"""What shows a paper's claim on one H100 is rehearsed there: all its runs and their phases, as `fit` cuts them.

A run takes three to twenty seconds of a processor. Peaks may be a little below the plan: of one row keys and values are
not copied into another order, which the plan counts.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from examples.papers.__main__ import PAPERS
from hybridtron.config.load import load
from hybridtron.planning.fit import fit, settings_of
from hybridtron.planning.rates import GPUS, HEAD_ROOM
from hybridtron.rehearse.suite import startable
from hybridtron.rehearse.suite_page import NEAR
from tests.rehearse.programs import printed_by

H100 = GPUS["h100"]
RUNS = {
    name: list(dict.fromkeys(run for claim in paper.claims if claim.on_gpu for run in claim.on_gpu.runs))
    for name, paper in PAPERS.items()
}


def laid_out(run: tuple[str, ...]) -> list[str]:
    """The run's settings with what makes it fit one H100, and what stands in for weights that it starts from."""
    recipe, *others = run
    settings = [*startable(recipe.removeprefix("recipe=")), *others]
    config = load(settings)
    return [*settings, *settings_of(fit(config, 1, H100.memory)[0], config)]


@cache
def rehearsed(paper: str, part: int, parts: int) -> list[tuple[str, dict[str, Any]]]:
    """Of a part of the runs: each with its phase, and what that was seen to do."""
    jobs = []
    for run in RUNS[paper][part::parts]:
        settings = laid_out(run)
        jobs += [(settings, 1, 0, False, index) for index in range(len(load(settings).phases))]
    found = printed_by("steps", json.dumps(jobs), timeout_s=500)
    return [(" ".join(job[0]), report) for job, report in zip(jobs, found, strict=True)]


PARTS = [(name, part, -(-len(runs) // 9)) for name, runs in RUNS.items() for part in range(-(-len(runs) // 9))]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("paper", "part", "parts"), PARTS)
def test_runs_of_claims_fit_one_h100_and_wait_once_a_step(paper: str, part: int, parts: int) -> None:
    pytest.importorskip("triton")
    for what, report in rehearsed(paper, part, parts):
        memory = report["memory"]
        assert memory["peak"] <= (1 + NEAR) * (1 - HEAD_ROOM) * H100.memory, what
        assert memory["peak"] <= (1 + NEAR) * memory["planned"], what
        assert (report["per_micro_batch"]["waits"], report["once"]["waits"]) == (0, 1), what


def test_every_paper_has_runs_of_one_gpu() -> None:
    assert all(RUNS.values())
    assert {"recipe=samba_421m", "recipe=mamba2_hybrid_2.7b_span", "recipe=length/official_780m"} < {
        run[0] for runs in RUNS.values() for run in runs
    }
