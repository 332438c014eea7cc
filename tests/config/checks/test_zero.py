"""Sizes of zero: they are reported by their limits, and no other rule divides by them."""

from __future__ import annotations

import pytest

from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan


@pytest.mark.parametrize(
    ("argument", "others"),
    [
        ("phases.0.micro_batch=0", ["states.mode=tbtt"]),
        ("phases.0.micro_batch=0", ["states.mode=passing", "states.carry=[ssm]"]),
        ("parallel.context=0", ["model.adapters={preset: lora, dropout: 0.1}"]),
    ],
)
def test_zero_is_reported_by_its_limit(argument: str, others: list[str]) -> None:
    key = argument.partition("=")[0]
    problems = check(RunPlan.of(load([*others, argument])))
    assert [(problem.key, problem.code) for problem in problems] == [(key, "out-of-range")]
