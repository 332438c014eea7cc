"""Tokens that are gathered again in the backward pass, under adapters and in phases that train some weights only."""

from __future__ import annotations

import pytest

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.activations import gathers_in_backward, sublayer_uses, with_frozen
from hybridtron.planning.memory import largest_phase
from hybridtron.planning.traffic import exchanged_values
from tests.planning.test_memory import TINY

REGATHERED = ("parallel.tensor=2", "parallel.sequence=true", "parallel.regather=true")


@pytest.mark.parametrize(
    ("phase", "again"),
    [
        ("phases.0.train=null", [8, 8, 8, 8]),
        ("phases.0.train=['layers.1.*']", [0, 8, 0, 0]),
        # adapters read the gathered tokens, and frozen projections need none
        ("phases.0.adapters={rank: 2, weights: ['*.q.*']}", [0, 0, 0, 0]),
    ],
)
def test_only_projections_that_learn_without_adapters_gather_again(phase: str, again: list[int]) -> None:
    once = exchanged_values(largest_phase(RunPlan.of(load([*TINY, *REGATHERED[:2], phase]))))
    twice = exchanged_values(largest_phase(RunPlan.of(load([*TINY, *REGATHERED, phase]))))
    assert [more - values for more, values in zip(twice, once, strict=True)] == again


def test_adapters_keep_all_gathered_tokens_by_hand() -> None:
    settings = [*TINY, "phases.0.adapters={rank: 2, weights: ['*.q.*']}"]
    uses = []
    for layout in (REGATHERED[:2], REGATHERED):
        phase = largest_phase(RunPlan.of(load([*settings, *layout])))
        uses.append([use.kept for use in with_frozen(sublayer_uses(phase), phase, phase.table)])
    assert uses[0] == uses[1]


@pytest.mark.parametrize(("weight", "gathers"), [("in_proj", True), ("gate_down", True), ("gate_up", False)])
def test_projections_of_inner_vectors_do_not_gather_the_input(weight: str, gathers: bool) -> None:
    """`gate_up` reads the output of `gate_down`, and not the mixer's input."""
    mixer = "model.layers.M={kind: gla, heads: 4}"
    train = f"phases.0.train=[layers.*.mixer.{weight}.weight]"
    phase = RunPlan.of(load([*TINY, mixer, *REGATHERED, train])).phases[0]
    assert gathers_in_backward(0, phase) is gathers
