"""Every rank of a big layout, built on the meta device: its shards add up, and agree with the plan."""

from __future__ import annotations

import dataclasses

import pytest

from hybridtron.config.load import load
from hybridtron.engine.dry_run import build_every_rank, faults
from hybridtron.planning.memory import largest_phase, plan

LAYOUTS = [
    ["recipe=samba_421m", "parallel.tensor=2", "parallel.pipeline=3"],
    ["recipe=samba_1.7b", "parallel.tensor=4", "parallel.sequence=true"],
    ["recipe=mistral_1.6b", "parallel.pipeline=2", "parallel.virtual_pipeline=4"],
    ["recipe=ablations/samba_421m_heads_12_1", "parallel.tensor=4"],
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout))
def test_shards_add_up_to_the_model_and_to_the_plan(layout: list[str]) -> None:
    config = load(layout)
    ranks = list(build_every_rank(config))
    assert faults(config, ranks) == []
    planned = plan(largest_phase(config), len(ranks)).ranks
    assert [built.parameters for built in ranks if built.tensor_rank == 0] == [rank.parameters for rank in planned]


def test_a_missing_or_wrong_shard_is_reported() -> None:
    config = load(["recipe=samba_421m", "parallel.tensor=2"])
    first, second = build_every_rank(config)
    shapes = dict(second.shapes)
    del shapes["layers.0.norm.weight"]
    shapes["layers.1.mixer.down.weight"] = (1536, 4096)
    said = "\n".join(faults(config, [first, dataclasses.replace(second, shapes=shapes)]))
    assert "layers.0.norm.weight on stage 0 has the shares" in said
    assert "layers.1.mixer.down.weight on stage 0" in said
