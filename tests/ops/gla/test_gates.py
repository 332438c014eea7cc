"""Log decays of gated linear attention: the reference against plain numbers, and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from hybridtron.ops.dispatch import force
from hybridtron.ops.gla import GLAGateInputs, gla_gates
from hybridtron.ops.gla.triton import GATES, MOST_DECAYS


def test_reference_equals_plain_numbers() -> None:
    a = 4 * torch.randn(2, 3, 4, dtype=torch.float64)
    bias = torch.randn(4, dtype=torch.float64)
    g = gla_gates.reference.function(GLAGateInputs(a, bias, 16.0))
    for place in ((row, token, channel) for row in range(2) for token in range(3) for channel in range(4)):
        logit = float(a[place] + bias[place[2]])
        assert g[place] == pytest.approx(-math.log1p(math.exp(-logit)) / 16)


def test_gradients_are_the_slopes() -> None:
    a = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with force(gla_gates="reference"):
        assert gradcheck(lambda *x: gla_gates(GLAGateInputs(*x, 16.0)), (a, bias))


def test_kernels_refuse_what_their_registers_do_not_hold() -> None:
    few, many = (
        GLAGateInputs(torch.ones(1, 1, channels), torch.ones(channels), 1.0)
        for channels in (MOST_DECAYS, MOST_DECAYS + 1)
    )
    assert GATES.unsupported_reason(few) is None
    assert f"{MOST_DECAYS + 1} key channels" in (GATES.unsupported_reason(many) or "")
