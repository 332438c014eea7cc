"""The rules of `run.verify_every`: it is refused where ranks can't compute a micro-batch alone, or with equal bits."""

from __future__ import annotations

import pytest

from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.problems import Problem

KEY = "run.verify_every"
DETERMINISTIC = (f"{KEY}=10", "run.deterministic=true")


def problems(*settings: str, world_size: int | None = None) -> list[Problem]:
    plan = RunPlan.of(load(list(settings)))
    return [problem for problem in check(plan, world_size) if problem.key == KEY]


def test_data_tensor_and_pipeline_parallelism_are_allowed() -> None:
    assert problems(*DETERMINISTIC) == []
    assert problems(*DETERMINISTIC, "parallel.tensor=2", "parallel.pipeline=2", world_size=8) == []
    assert problems("parallel.context=2", "run.verify_state=1") == []


@pytest.mark.parametrize(
    "setting",
    [
        "run.deterministic=false",
        "parallel.context=2",
        "parallel.expert=2",
        "precision=fp8_current",
        "run.compile=true",
        "run.cuda_graph=true",
    ],
)
def test_other_settings_are_refused(setting: str) -> None:
    (problem,) = problems(*DETERMINISTIC, setting)
    assert problem.code == "needs-other-key"
    assert setting.partition("=")[0] in problem.message


def test_a_single_data_parallel_rank_is_refused() -> None:
    assert problems(*DETERMINISTIC, world_size=2) == []
    (problem,) = problems(*DETERMINISTIC, "parallel.tensor=2", world_size=2)
    assert problem.code == "unsupported"
