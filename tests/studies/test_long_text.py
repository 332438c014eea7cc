"""Perplexity far beyond the context, beside that of the same tokens within it."""

from __future__ import annotations

import math

import pytest
import torch

from hybridtron.inference.reader import reader
from studies.long_text import Beyond, Curve
from tests.conftest import small_model

CONTEXT = 8
LENGTH = 24


def test_perplexity_does_not_rise_without_memory() -> None:
    """MLPs alone: both readings are the same, however hard the text is in places."""
    model = small_model("--", torch.float64)
    tokens_BT = torch.randint(61, (3, LENGTH + 1))
    beyond = Beyond.of(reader(model), tokens_BT, CONTEXT)
    assert beyond.risen(LENGTH) == pytest.approx(0, abs=1e-9)
    assert len(set(beyond.curve.perplexities)) == len(beyond.curve.ends)


def test_a_rise_is_read_from_its_bin() -> None:
    beyond = Beyond(Curve([8, 16, 32], [4.0, 6.0, 9.0]), Curve([8, 16, 32], [4.0, 5.0, 6.0]))
    assert beyond.risen(16) == beyond.risen(31) == pytest.approx(math.log(1.2))
    assert beyond.risen(32) == pytest.approx(math.log(1.5))
