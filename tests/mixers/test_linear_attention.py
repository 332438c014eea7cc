"""Retention compared with its parallel form, with complex rotations; and the decays of tensor-parallel ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.gla import GLASpec
from hybridtron.architecture.retnet import RetNetSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import build_mixer
from hybridtron.mixers.retnet import log_gammas
from hybridtron.parallel.linear import SINGLE_RANK

SIZES = ModelSizes(width=24, num_sublayers=2)


def test_retention_equals_its_parallel_form() -> None:
    """(Q K^T * D) V with D_ij = gamma^(i - j), q and k turned as complex numbers, RMSNorm and gate written out."""
    spec = RetNetSpec(heads=3)
    length = 150
    mixer = build_mixer(spec, SIZES, SINGLE_RANK).double()
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x = torch.randn(length, 1, SIZES.width, dtype=torch.float64)
    projected = (x[:, 0] @ mixer.in_proj.weight.T).split((24, 24, 48, 48), dim=-1)
    q, k, v, z = (part.view(length, 3, -1).transpose(0, 1) for part in projected)
    angles = torch.outer(torch.arange(length).double(), 10000.0 ** (-torch.arange(4).double() / 4))
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.complex(x[..., :4], x[..., 4:]) * turn for x in (q, k))
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    gamma = 1 - 2.0 ** (-5 - torch.arange(3, dtype=torch.float64))
    decay = torch.where(distance >= 0, gamma.view(3, 1, 1) ** distance.clamp(min=0), 0.0)
    read = (q @ k.mH).real * decay / math.sqrt(8) @ v
    normed = read / (read.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm_weight
    expected = (normed * z * torch.sigmoid(z)).transpose(0, 1).flatten(1) @ mixer.out_proj.weight.T
    assert_close(mixer(x, None, SeqInfo.stream(1, length)).y_LBD[:, 0], expected, rtol=1e-9, atol=1e-10)


def test_decays_of_ranks_join_to_the_decays_of_all_heads() -> None:
    whole = log_gammas(6, 0, torch.device("cpu"))
    assert torch.equal(torch.cat([log_gammas(3, 0, whole.device), log_gammas(3, 3, whole.device)]), whole)
    assert_close(whole.exp(), 1 - 2.0 ** -torch.arange(5, 11, dtype=torch.float64))


@pytest.mark.parametrize("spec", [GLASpec(heads=3), RetNetSpec(heads=3)])
def test_ranks_that_would_cut_heads_are_refused(spec: GLASpec | RetNetSpec) -> None:
    assert [problem.key for problem in spec.layout_problems(SIZES, 2)] == ["heads"]
    assert not list(spec.layout_problems(SIZES, 3))
