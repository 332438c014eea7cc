"""Limits within which the audit takes two sides for equal, on numbers made by hand."""

from __future__ import annotations

import pytest
import torch

from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.proving.audit.cases import shrunk
from hybridtron.proving.audit.differences import PRECISIONS, AuditPrecision, Step, differences

FLOAT64, FP32 = PRECISIONS
CONFIG = shrunk(load(["recipe=laptop"]), 1)
TABLE = architecture(CONFIG.model).table


def step(norm: float, silent: float = 1.0) -> Step:
    """A step with two gradients: (norm, 1) and (silent)."""
    weights = {"norm.weight": torch.ones(CONFIG.model.width)}
    gradients = {"norm.weight": torch.tensor([norm, 1.0]), "head.weight": torch.tensor([silent])}
    return Step(2.0, 1.0, 1.9, gradients, weights, {}, {}, {})


def failing(truth: Step, actual: Step, precision: AuditPrecision, *moved: Step) -> list[str]:
    compared = differences(truth, [actual], TABLE, precision, moved)
    return [difference.what for difference in compared if not difference.passes]


def test_values_may_differ_by_as_much_as_rounding_moves_them() -> None:
    truth = step(1.0)
    off = step(1.0 + 8e-5)
    assert failing(truth, off, FP32) == ["gradient of norm.weight"]
    assert failing(truth, off, FP32, step(1.0 + 1e-6)) == ["gradient of norm.weight"]
    assert failing(truth, off, FP32, step(1.0), step(1.0 - 4e-5), step(1.0 + 1e-6)) == []
    assert failing(truth, step(1.0 + 1.5e-4), FP32, step(1.0 - 4e-5)) == ["gradient of norm.weight"]
    assert failing(truth, off, FLOAT64, step(1.0 - 4e-5)) == ["gradient of norm.weight"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_values_that_are_not_finite_fail(wrong: float) -> None:
    assert failing(step(1.0), step(wrong), FP32, step(1.0 + 1e-6)) == ["gradient of norm.weight"]


def test_gradients_of_zero_may_differ_by_rounding() -> None:
    """Two sides add up in different orders, and leave about 1e-19 of a gradient that is 0."""
    assert failing(step(1.0, 1.6e-19), step(1.0, -3e-19), FLOAT64) == []
    assert failing(step(1.0, 1.6e-19), step(1.0, 1e-12), FLOAT64) == ["gradient of head.weight"]
