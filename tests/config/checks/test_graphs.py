"""The rules of `run.cuda_graph`: it is refused where no rehearsal has shown that a graph can repeat a micro-batch."""

from __future__ import annotations

import pytest

from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.problems import Problem


def problems(*settings: str, world_size: int | None = None) -> list[Problem]:
    plan = RunPlan.of(load(["run.cuda_graph=true", *settings]))
    return [problem for problem in check(plan, world_size) if problem.key == "run.cuda_graph"]


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("recipe=samba_421m",),
        ("recipe=mamba2_1.3b",),
        ("data.documents=isolate",),
        ("parallel.recompute=layer",),
        ("model.adapters={rank: 4, dropout: 0.1}",),
    ],
)
def test_samba_and_mamba2_are_allowed(settings: tuple[str, ...]) -> None:
    assert problems(*settings) == []


@pytest.mark.parametrize(
    "setting",
    [
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.context=2",
        "parallel.offload=1",
        "parallel.transformer_engine=true",
        "run.compile=true",
        "precision=fp8_current",
        "states.mode=tbtt",
        "states.mode=random",
    ],
)
def test_other_settings_are_refused(setting: str) -> None:
    (problem,) = problems(setting)
    assert problem.code == "needs-other-key"
    assert setting.partition("=")[0] in problem.message


def test_gradients_that_are_reduced_in_the_backward_pass_are_refused() -> None:
    assert [problem.code for problem in problems(world_size=2)] == ["needs-other-key"]
    assert [problem.code for problem in problems("parallel.overlap_grad_reduce=true")] == ["needs-other-key"]
    assert problems("parallel.overlap_grad_reduce=false", world_size=2) == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (("recipe=gla_360m",), "gla"),
        (("recipe=moe_laptop",), "moe"),
        (("recipe=samba_span_laptop",), "span"),
        (("model.layers.M.sparse={}",), "mamba with sparse"),
    ],
)
def test_other_mixers_are_refused(settings: tuple[str, ...], named: str) -> None:
    (problem,) = problems(*settings)
    assert problem.code == "unsupported"
    assert named in problem.message


def test_nothing_is_refused_without_the_key() -> None:
    plan = RunPlan.of(load(["recipe=gla_360m", "states.mode=tbtt"]))
    assert [problem for problem in check(plan) if problem.key == "run.cuda_graph"] == []
