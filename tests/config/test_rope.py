"""Rotary positions as options of letters and phases: allowed changes, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtron.architecture.rope import RopeOptions
from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.problems import ConfigError

PHASES = (
    "phases=[{name: short, tokens: 1M, seq_len: 512, global_batch: 4, lr: 1e-3},"
    " {name: long, tokens: 1M, seq_len: 512, global_batch: 4, lr: 1e-3, layers: {W: %s}}]"
)


def rope_of(second: str, *settings: str) -> Any:
    """Return the rotary options of `laptop`'s attention in a second phase with these options."""
    config = load(["recipe=laptop", *settings, PHASES % second])
    assert check(RunPlan.of(config), 1) == []
    specs = architecture(resolve(config)[1].model).by_letter
    return specs["W"].rope


@pytest.mark.parametrize(
    ("before", "options", "expected"),
    [
        ("{base: 500}", "{rope: {scale: linear, factor: 4}}", RopeOptions(500.0, "linear", 4.0)),
        ("{base: 500}", "{rope: {base: 7000}}", RopeOptions(7000.0)),
        ("{base: 500}", "{rope_base: 7000}", RopeOptions(7000.0)),
        ("{base: 500}", "{rope: none}", "none"),
        ("{base: 500}", "{rope: null}", RopeOptions()),
        ("none", "{rope: {base: 7000}}", RopeOptions(7000.0)),
        ("{scale: llama3, factor: 8, original: 64}", "{rope: {factor: 2}}", RopeOptions(1e4, "llama3", 2.0, 64)),
        (
            "{base: 500, scale: llama3, factor: 8, original: 64}",
            "{rope: {scale: null, factor: null, original: null}}",
            RopeOptions(500.0),
        ),
    ],
)
def test_a_phase_changes_only_the_rope_options_that_it_names(
    before: str, options: str, expected: RopeOptions | str
) -> None:
    assert rope_of(options, f"model.layers.W.rope={before}") == expected


def test_a_phase_replaces_the_former_rope_key_of_a_recipe() -> None:
    options = "{rope: {scale: yarn, factor: 4, original: 512}}"
    assert rope_of(options, "model.layers.W.rope_base=500") == RopeOptions(500.0, "yarn", 4.0, 512)


@pytest.mark.parametrize(
    ("options", "key", "code"),
    [
        ("{rope: {scale: ntk}}", "scale", "unknown-name"),
        ("{rope: {scale: yarn, factor: 4}}", "original", "missing"),
        ("{rope: {scale: linear}}", "factor", "missing"),
        ("{rope: {factor: 4}}", "factor", "no-effect"),
        ("{rope: {scale: linear, factor: 2, high: 3}}", "high", "no-effect"),
        ("{rope: {scale: llama3, factor: 2, original: 9, low: 5}}", "low", "out-of-range"),
        ("{rope: {scale: linear, factor: 0.5}}", "factor", "out-of-range"),
        ("{rope: {bases: 10}}", "bases", "unknown-name"),
    ],
)
def test_wrong_options_are_refused(options: str, key: str, code: str) -> None:
    config = load(["recipe=laptop", PHASES % options])
    (problem,) = check(RunPlan.of(config), 1)
    assert problem.key.endswith(f"W.rope.{key}")
    assert problem.code == code


def test_the_former_name_beside_the_new_one_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        architecture(load(["recipe=laptop", "model.layers.W.rope_base=5", "model.layers.W.rope.base=6"]).model)
    (problem,) = caught.value.problems
    assert (problem.key, problem.code) == ("model.layers.W.rope_base", "conflict")


def test_a_rope_base_replaces_rope_none() -> None:
    config = load(["recipe=laptop", "model.layers.W.rope=none", "model.layers.W.rope.base=600"])
    assert config.model.layers["W"]["rope"] == {"base": 600}
