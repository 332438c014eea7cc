"""Recipes of published models with experts are exported as the class whose sizes they have."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import JambaConfig, JambaForCausalLM, NemotronHConfig, NemotronHForCausalLM

from hybridtron.architecture.table import architecture
from hybridtron.config.choices import Export
from hybridtron.config.load import load
from hybridtron.config.resolve import resolve
from hybridtron.interop.export import target_of
from hybridtron.planning.memory import plan

PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"  # of the published config.json
CASES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "nemotron_3_nano_30b": (NemotronHForCausalLM, NemotronHConfig, {"hybrid_override_pattern": PATTERN}),
    "jamba_mini": (JambaForCausalLM, JambaConfig, {"attn_layer_period": 8, "attn_layer_offset": 4}),
}


@pytest.mark.parametrize("recipe", CASES)
def test_recipes_have_the_weights_of_their_class(recipe: str) -> None:
    """transformers builds its class, without values, from the config.json of an export; a correction is a buffer."""
    make, config, expected = CASES[recipe]
    arch = architecture(load([f"recipe={recipe}"]).model)
    target = target_of(arch, Export.auto)
    settings = json.loads(json.dumps(target.config(arch, 4096)))
    assert target.name == make.__name__
    assert {key: settings[key] for key in expected} == expected
    with torch.device("meta"):
        theirs = make(config(**settings))
    weights = [*theirs.parameters(), *(buffer for name, buffer in theirs.named_buffers() if "correction" in name)]
    assert sum(weight.numel() for weight in weights) == sum(weight.size for weight in arch.table.values())


@pytest.mark.parametrize(
    ("recipe", "tensor", "pipeline", "largest"), [("nemotron_3_nano_30b", 4, 4, 62), ("jamba_mini", 8, 2, 68)]
)
def test_recipes_fit_on_sixteen_devices_as_their_comments_say(
    recipe: str, tensor: int, pipeline: int, largest: int
) -> None:
    layout = [f"parallel.tensor={tensor}", "parallel.sequence=true", f"parallel.pipeline={pipeline}"]
    phase = resolve(load([f"recipe={recipe}", *layout]))[0]
    assert max(round(rank.memory.total / 1e9) for rank in plan(phase, 16).ranks) == largest


def test_jamba_mini_has_the_default_sizes_of_transformers() -> None:
    arch = architecture(load(["recipe=jamba_mini"]).model)
    settings = json.loads(json.dumps(target_of(arch, Export.auto).config(arch, 4096)))
    defaults = JambaConfig().to_dict()
    trained = {"max_position_embeddings", "initializer_range"}
    shared = settings.keys() & defaults.keys() - trained - {"architectures"}
    assert {key: settings[key] for key in shared} == {key: defaults[key] for key in shared}
