"""The recurrences compared with flash-linear-attention's plain forms in torch, if that package is installed.

They compute in fp32, token by token. Its kernels and its layers need Triton and a GPU: they are not compared, and of
Mamba-3 it has no plain form.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hybridtron.mixers.retnet import log_gammas
from hybridtron.mixers.rwkv6 import read_before_step
from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.ssd import DecayInputs, decay_scan

pytest.importorskip("fla", reason="pip install --no-deps flash-linear-attention fla-core einops")
pytest.importorskip("einops", reason="pip install einops")
pytestmark = pytest.mark.slow

ROWS = 2
LENGTH = 130
HEADS = 3
KEY = 16
VALUE = 24


def plain(file: str, function: str) -> Any:
    """Return one of the package's functions; those with heads before tokens are called through `heads_first`."""
    return getattr(import_module(f"fla.ops.{file}"), function)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(3)
    q, k = torch.randn(2, ROWS, LENGTH, HEADS, KEY)
    return {
        "q": q,
        "k": F.normalize(k, dim=-1),
        "v": torch.randn(ROWS, LENGTH, HEADS, VALUE),
        "g": -F.softplus(torch.randn(ROWS, LENGTH, HEADS, KEY)),
        "beta": 2 * torch.rand(ROWS, LENGTH, HEADS),
        "state": torch.randn(ROWS, HEADS, KEY, VALUE),
    }


def heads_first(*tokens_first: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2).contiguous() for tensor in tokens_first]


def same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], scale: float = 1.0) -> None:
    """Outputs and states; theirs scale the queries by the root of the key size."""
    assert_close(ours[0] * scale, theirs[0], rtol=1e-4, atol=2e-5)
    assert_close(ours[1], theirs[1], rtol=1e-4, atol=2e-5)


def test_gla_equals_flash_linear_attention(tensors: dict[str, Tensor]) -> None:
    q, k, v, g, state = (tensors[name] for name in ("q", "k", "v", "g", "state"))
    theirs = plain("gla.naive", "naive_recurrent_gla")(q, k, v, g, state, output_final_state=True)
    same(gla_scan(GLAInputs(q, k, v, g, state)), theirs, KEY**-0.5)


def test_retention_equals_flash_linear_attention(tensors: dict[str, Tensor]) -> None:
    """Use the decays of all its heads."""
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    theirs = plain("retention.naive", "naive_retention")(*heads_first(q, k, v[..., :KEY])).transpose(1, 2)
    g_BLH = log_gammas(HEADS, 0, q.device).float().expand(ROWS, LENGTH, HEADS)
    ours, _ = decay_scan(DecayInputs(q, k, v[..., :KEY], g_BLH))
    assert_close(ours * KEY**-0.5, theirs, rtol=1e-4, atol=2e-5)


def test_rwkv6_equals_flash_linear_attention(tensors: dict[str, Tensor]) -> None:
    q, k, v, g, state = (tensors[name] for name in ("q", "k", "v", "g", "state"))
    bonus_HN = torch.randn(HEADS, KEY)
    recurrence = plain("rwkv6.recurrent_naive", "naive_recurrent_rwkv6")
    theirs, last = recurrence(*heads_first(q, k, v, g), bonus_HN, 1.0, state, output_final_state=True)
    same(read_before_step(GLAInputs(q, k, v, g, state), bonus_HN), (theirs.transpose(1, 2), last))


def test_delta_rule_equals_flash_linear_attention(tensors: dict[str, Tensor]) -> None:
    q, k, v, beta, state = (tensors[name] for name in ("q", "k", "v", "beta", "state"))
    theirs, last = plain("delta_rule.naive", "delta_rule_recurrence")(*heads_first(q, k, v, beta), state)
    ours = delta_scan(DeltaInputs(q, k, v, beta, torch.zeros(ROWS, LENGTH, HEADS, 1), state))
    same(ours, (theirs.transpose(1, 2), last), KEY**-0.5)


def test_gated_delta_rule_equals_flash_linear_attention(tensors: dict[str, Tensor]) -> None:
    q, k, v, beta, state = (tensors[name] for name in ("q", "k", "v", "beta", "state"))
    g_BLH1 = tensors["g"][..., :1]
    recurrence = plain("gated_delta_rule.naive", "naive_recurrent_gated_delta_rule")
    theirs = recurrence(q, k, v, beta, g_BLH1.squeeze(-1), initial_state=state, output_final_state=True)
    same(delta_scan(DeltaInputs(q, k, v, beta, g_BLH1, state)), theirs, KEY**-0.5)


def test_kda_equals_flash_linear_attention(tensors: dict[str, Tensor]) -> None:
    q, k, v, beta, g, state = (tensors[name] for name in ("q", "k", "v", "beta", "g", "state"))
    recurrence = plain("kda.naive", "naive_recurrent_kda")
    theirs = recurrence(q, k, v, g, beta, initial_state=state, output_final_state=True)
    same(delta_scan(DeltaInputs(q, k, v, beta, g, state)), theirs, KEY**-0.5)
