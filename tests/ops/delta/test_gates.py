"""Step sizes and log decays of the delta rule: the reference against plain numbers, and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from hybridtron.ops.delta import DeltaGateInputs, delta_gates
from hybridtron.ops.delta.triton import GATES, MOST_DECAYS
from hybridtron.ops.dispatch import force


def random_inputs(rows: int, length: int, heads: int, group: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return logits of the decays and step sizes, token-major in memory as projections return them, and parameters."""
    a_LBX = 4 * torch.randn(length, rows, heads * group)
    b_LBH = 4 * torch.randn(length, rows, heads)
    parameters = torch.randn(heads * group), torch.randn(heads)
    return [a_LBX.to(dtype).transpose(0, 1), b_LBH.to(dtype).transpose(0, 1), *parameters]


def test_reference_equals_plain_numbers() -> None:
    a, b, dt_bias, A_log = (x.double() for x in random_inputs(2, 3, 2, 4))
    beta, g = delta_gates.reference.function(DeltaGateInputs(a, b, dt_bias, A_log, 2.0))
    for row in range(2):
        for token in range(3):
            for head in range(2):
                assert beta[row, token, head] == pytest.approx(2 / (1 + math.exp(-b[row, token, head])))
                for channel in range(4):
                    x = 4 * head + channel
                    step = math.log1p(math.exp(a[row, token, x] + dt_bias[x]))
                    assert g[row, token, head, channel] == pytest.approx(-math.exp(A_log[head]) * step)


def test_gradients_are_the_slopes() -> None:
    leaves = tuple(x.double().requires_grad_() for x in random_inputs(2, 3, 2, 2))
    with force(delta_gates="reference"):
        assert gradcheck(lambda *x: delta_gates(DeltaGateInputs(*x, 1.5)), leaves)


def test_kernels_refuse_what_their_registers_do_not_hold() -> None:
    few, many = (DeltaGateInputs(*random_inputs(1, 1, 1, group)) for group in (MOST_DECAYS, MOST_DECAYS + 1))
    assert GATES.unsupported_reason(few) is None
    assert f"{MOST_DECAYS + 1} decays" in (GATES.unsupported_reason(many) or "")
