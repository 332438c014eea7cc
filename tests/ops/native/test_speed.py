"""The compiled forms are worth their compiler: ratios to torch's forms in small, in one run, by processor time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from hybridtron.ops.attention import AttentionInputs, attention
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.dispatch import Op, force
from hybridtron.ops.scan import ScanInputs, selective_scan
from hybridtron.ops.ssd import SSDInputs, ssd_scan

ROUNDS = 7


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def scan() -> tuple[Op, Any]:
    x, dt, z, B, C = (normal(1, 256, size) for size in (384, 384, 384, 16, 16))
    A = -torch.rand(384, 16).add(0.5).requires_grad_()
    return selective_scan, ScanInputs(x, dt, A, B, C, normal(384), normal(384), z)


def ssd() -> tuple[Op, Any]:
    x = normal(1, 512, 8, 64)
    dt = normal(1, 512, 8)
    B = normal(1, 512, 1, 64)
    C = normal(1, 512, 1, 64)
    return ssd_scan, SSDInputs(x, dt, -torch.rand(8).add(0.5).requires_grad_(), B, C, normal(8), normal(8))


def delta() -> tuple[Op, Any]:
    q = normal(1, 512, 8, 64)
    v = normal(1, 512, 8, 64)
    key = normalize(torch.randn(1, 512, 8, 64), dim=-1)
    beta = torch.rand(1, 512, 8).requires_grad_()
    g = -torch.rand(1, 512, 8, 1)
    return delta_scan, DeltaInputs(q, key.requires_grad_(), v, beta, g.requires_grad_())


def conv() -> tuple[Op, Any]:
    return causal_conv, ConvInputs(normal(4, 256, 384), normal(384, 4), normal(384), activation=True)


def window() -> tuple[Op, Any]:
    q, k, v = (normal(4, 256, 4, 48) for _ in range(3))
    return attention, AttentionInputs(q, k, v, 128)


def seconds(op: Op, form: str, inputs: Any) -> float:
    started = time.process_time()
    with force(form):
        y = op(inputs)
    if isinstance(y, tuple):
        y = y[0]
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    torch.autograd.grad(y.sum(), wanted)
    return time.process_time() - started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "other", "wanted"),
    [
        (scan, "chunked", 4.0),
        (ssd, "chunked", 2.5),
        (delta, "chunked", 2.0),
        (conv, "reference", 1.5),
        (window, "blocked", 1.2),
    ],
)
def test_compiled_forms_are_faster_than_torch(case: Any, other: str, wanted: float) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        op, inputs = case()
        rounds = [(seconds(op, other, inputs), seconds(op, "native", inputs)) for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(before)
    theirs = min(other_s for other_s, _ in rounds)
    ours = min(native_s for _, native_s in rounds)
    assert theirs / ours >= wanted
