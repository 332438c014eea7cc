"""Recurrences of four heads on four tensor-parallel ranks, one head each: nothing changes."""

from __future__ import annotations

import pytest

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.schema import Documents, ParallelConfig
from hybridtron.proving.audit.audit import Audit
from hybridtron.proving.audit.cases import VOCABULARY, Case, Layout, small
from hybridtron.proving.audit.differences import PRECISIONS, AuditPrecision
from tests.distributed import pool

LINEAR = {"heads": 4, "norm_eps": 0.01}
LETTERS = {
    "A": {"kind": "gla", "conv": 3, **LINEAR},
    "R": {"kind": "retnet", **LINEAR},
    "D": {"kind": "gated_deltanet", "key_heads": 4, "expand_k": 0.5, **LINEAR},
    "K": {"kind": "kda", "negative_eigenvalues": True, **LINEAR},
    "T": {"kind": "mamba3", "state": 4, "head_dim": 8, "groups": 2},
    "N": {"kind": "rwkv6", "head_dim": 8, "mix_rank": 3, "decay_rank": 5, "norm_eps": 0.01},
    "V": {"kind": "rwkv6_channel_mix"},
}


@pytest.mark.gloo
@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tp4", "tp4-sp"])
@pytest.mark.parametrize(
    "precision",
    [pytest.param(p, id=p.name, marks=[pytest.mark.slow] * (p != PRECISIONS[0])) for p in PRECISIONS],
)
def test_recurrences_over_four_tensor_ranks_equal_one_process(sequence: bool, precision: AuditPrecision) -> None:
    model = ModelConfig(32, VOCABULARY, "ARDKTNV", LETTERS, tie_embeddings=True)
    parallel = Layout(tensor=4, sequence=sequence).on(ParallelConfig())
    config = small(model, parallel, Documents.isolate, data=1)
    worst = Audit(pool()).compare(Case("four", "tp4", config, 1), precision)[0]
    assert worst.passes, f"{worst.what} is off by {worst.relative:.1e}"
