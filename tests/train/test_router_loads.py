"""Warnings about uneven loads: by layer, with the numbers, and again only if a layer has become clearly worse."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtron.config.load import load
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.planning.activations import even_rows_gib
from hybridtron.train import router_loads
from hybridtron.train.router_loads import RouterLoads

EVEN = {"load_max_over_mean": 1.1, "idle": 0, "entropy": 0.9, "dropped": 0.0, "rank_max_over_mean": 1.0}


FULL_EXPERTS = ("parallel.tensor=2", "parallel.sequence=true", "parallel.expert_tensor=1")


def phase_of(*settings: str) -> ResolvedPhase:
    return RunPlan.of(load(["recipe=moe_laptop", "parallel.expert=2", *settings])).phases[0]


def texts(hook: RouterLoads, phase: ResolvedPhase, **values: Any) -> list[str]:
    return list(hook.grown({"layers.1": {**EVEN, **values}, "layers.3": EVEN}, phase))


@pytest.mark.parametrize(
    ("name", "first", "little", "much", "said"),
    [
        ("load_max_over_mean", 3.1, 5.9, 6.3, "is 6.3 times the mean"),
        ("idle", 1, 1, 2, "2 experts have no token"),
        ("entropy", 0.5, 0.3, 0.25, "entropy 0.25 of its maximum"),
        ("rank_max_over_mean", 1.5, 1.8, 1.9, "1.9 times the mean number of rows"),
    ],
)
def test_a_layer_is_reported_when_it_becomes_clearly_worse(
    name: str, first: float, little: float, much: float, said: str
) -> None:
    hook = RouterLoads()
    phase = phase_of()
    assert texts(hook, phase) == []
    assert len(texts(hook, phase, **{name: first})) == 1
    assert texts(hook, phase, **{name: little}) == []
    (text,) = texts(hook, phase, **{name: much})
    assert text.startswith("layers.1: ")
    assert said in text
    assert texts(hook, phase, **{name: much}) == []


def test_warning_has_the_memory_that_planning_counts() -> None:
    phase = phase_of()
    even = even_rows_gib(phase.arch.specs[1], phase)  # type: ignore[arg-type]
    (text,) = texts(RouterLoads(), phase, rank_max_over_mean=2.0)
    assert f"about {2 * even:.2f} GiB" in text
    assert f"not {even:.2f} GiB" in text


@pytest.mark.parametrize(("free", "said"), [(None, "not 0."), (100.0, "100.00 GiB free"), (0.01, "may not fit")])
def test_a_load_that_may_not_fit_is_said(free: float | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_loads, "free_memory_gib", lambda: free)
    (text,) = texts(RouterLoads(), phase_of(), rank_max_over_mean=2.0)
    assert said in text
    assert ("may not fit" in text) == (said == "may not fit")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.layers.-.capacity=1.5"], False),
        (["model.layers.-.capacity=1.5", "parallel.context=2"], True),
        (["model.layers.-.capacity=1.5", *FULL_EXPERTS], True),
    ],
)
def test_a_capacity_keeps_the_memory_of_ranks_with_full_rows(settings: list[str], said: bool) -> None:
    phase = phase_of("data.documents=join", *settings)
    (text,) = texts(RouterLoads(), phase, rank_max_over_mean=2.0, idle=1)
    assert ("GiB" in text) == said
    assert len(texts(RouterLoads(), phase, rank_max_over_mean=2.0)) == said


@pytest.mark.parametrize(
    ("settings", "helps"),
    [(["data.documents=join"], True), (["data.documents=isolate"], False), (["parallel.context=2"], False)],
)
def test_a_capacity_is_advised_only_if_it_bounds_rows(
    settings: list[str], helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_loads, "free_memory_gib", lambda: 0.001)
    (text,) = texts(RouterLoads(), phase_of("data.documents=join", *settings), rank_max_over_mean=2.0)
    assert ("use a capacity or" in text) == helps
    assert "a smaller micro_batch" in text
