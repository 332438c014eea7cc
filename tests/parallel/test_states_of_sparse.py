"""Carried memory of sparse attention: one process's losses in other layouts, also after a resume in another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.schema import Config, ParallelConfig, StateMode
from tests.distributed import run_distributed
from tests.parallel.test_states import (
    LAYERS,
    ROW_LAYOUTS,
    STOPPED,
    VOCABULARY,
    config_of,
    losses,
    resumed,
)

MAMBA2 = {"kind": "mamba2", "state": 4, "head_dim": 8}
MODEL = ModelConfig(
    32,
    VOCABULARY,
    "QIA-",
    {
        "Q": {"kind": "mamba", "state": 4, "sparse": {"keys": 8, "hashes": 3}},
        "I": {**MAMBA2, "groups": 2, "sparse": {"keys": 6, "bins": "sign", "hashes": 2}},
        "A": {**MAMBA2, "sparse": {"pattern": "sink_window", "keys": 6}},
        "-": LAYERS["-"],
    },
)


def branches(parallel: ParallelConfig) -> Config:
    config = config_of(StateMode.tbtt, parallel)
    return replace(config, model=MODEL, phases=[replace(config.phases[0], lr=2e-3)])


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("layout", ["cp2", "cp4"])
def test_sequence_shards_with_sparse_attention_have_the_losses_of_one_process(layout: str) -> None:
    parallel, ranks = ROW_LAYOUTS[layout]
    (expected,) = run_distributed(losses, 1, branches(ParallelConfig()))
    for of_rank in run_distributed(losses, ranks, branches(parallel)):
        assert of_rank == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2-sp", "pp2"),
        ("cp2", "tp2"),
        pytest.param("dp2", "tp2-pp2", marks=pytest.mark.slow),
        pytest.param("tp2-pp2", "dp2", marks=pytest.mark.slow),
    ],
)
def test_run_with_sparse_attention_resumes_in_another_layout(before: str, after: str, tmp_path: Path) -> None:
    continued, whole = resumed(before, after, branches, tmp_path)
    (expected,) = run_distributed(losses, 1, branches(ParallelConfig()))
    assert continued == pytest.approx(expected[STOPPED:], rel=1e-4)
    assert {"sparse_keys", "sparse_scores", "sparse_queries"} <= {key.split(".")[-1] for key in whole}
