"""Every rank of a big layout, built on the meta device: its shards add up, and agree with the plan."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hybridtron.cli import inspect
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.engine.dry_run import build_every_rank, faults
from hybridtron.planning.memory import largest_phase, plan

EXPERTS = ["recipe=moe_laptop", "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"]
LAYOUTS = [
    ["recipe=samba_421m", "parallel.tensor=2", "parallel.pipeline=3"],
    ["recipe=samba_1.7b", "parallel.tensor=4", "parallel.sequence=true"],
    ["recipe=mistral_1.6b", "parallel.pipeline=2", "parallel.virtual_pipeline=4"],
    ["recipe=ablations/samba_421m_heads_12_1", "parallel.tensor=4"],
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout))
def test_shards_of_all_ranks_add_up_to_the_model_and_the_plan(layout: list[str]) -> None:
    config = load(layout)
    ranks = list(build_every_rank(RunPlan.of(config)))
    assert faults(RunPlan.of(config), ranks) == []
    planned = plan(largest_phase(RunPlan.of(config)), len(ranks)).ranks
    assert [built.parameters for built in ranks if built.tensor_rank == 0] == [rank.parameters for rank in planned]


def test_missing_and_wrong_shards_are_reported() -> None:
    config = load(["recipe=samba_421m", "parallel.tensor=2"])
    first, second = build_every_rank(RunPlan.of(config))
    shapes = dict(second.shapes)
    del shapes["layers.0.norm.weight"]
    shapes["layers.1.mixer.down.weight"] = (1536, 4096)
    reported = "\n".join(faults(RunPlan.of(config), [first, dataclasses.replace(second, shapes=shapes)]))
    assert "layers.0.norm.weight" in reported
    assert "layers.1.mixer.down.weight" in reported


def test_json_with_a_dry_run_is_one_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["recipe=laptop", "parallel.tensor=2"]
    assert inspect.main([*settings, "--json", "--dry-run"]) == 0
    built = json.loads(capsys.readouterr().out)["dry_run"]
    assert [(rank["rank"], rank["tensor_rank"]) for rank in built["ranks"]] == [(0, 0), (1, 1)]
    assert built["mismatches"] == []
    monkeypatch.setattr("hybridtron.engine.dry_run.faults", lambda *_: ["a weight is missing"])
    assert inspect.main([*settings, "--json", "--dry-run"]) == 1
    assert json.loads(capsys.readouterr().out)["dry_run"]["mismatches"] == ["a weight is missing"]


@pytest.mark.parametrize(
    "layout", [["parallel.expert=2"], ["parallel.expert=4", "parallel.expert_tensor=1"]], ids=" ".join
)
def test_every_rank_has_its_share_of_the_experts(layout: list[str]) -> None:
    run_plan = RunPlan.of(load([*EXPERTS, *layout]))
    ranks = list(build_every_rank(run_plan))
    assert len(ranks) == 8
    assert faults(run_plan, ranks) == []
    experts = {shape[0] for rank in ranks for name, shape in rank.shapes.items() if name.endswith("gate_up")}
    assert experts == {8 // run_plan.config.parallel.expert}
