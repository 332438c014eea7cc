"""The rank of each sub-layer: cuts made by hand, all cuts by brute force, and the messages."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.config.pipeline_layout import (
    balanced,
    chunks_on,
    data_parallel,
    embedding_cost,
    head_cost,
    launched,
    layer_costs,
    stage_layers,
    stages_of,
)
from hybridtron.config.schema import ParallelConfig
from hybridtron.problems import ConfigError
from tests.refusals import raises_code

MODEL = ModelConfig(
    width=8,
    vocab_size=16,
    pattern="M-W-M",
    layers={
        "M": {"kind": "mamba", "state": 2},
        "W": {"kind": "attention", "heads": 2},
        "-": {"kind": "swiglu", "hidden": 16},
    },
)


@pytest.mark.parametrize(
    ("costs", "chunks", "sizes"),
    [
        ([5], 1, (1,)),
        ([1, 1, 1, 1], 2, (2, 2)),
        ([1, 1, 1, 1, 1], 2, (2, 3)),  # as good as (3, 2); the earlier border wins
        ([1, 1, 1, 1, 4], 2, (4, 1)),  # a heavy head
        ([9, 1, 1, 1], 2, (1, 3)),
        ([3, 1, 1, 1, 3, 1, 1, 1], 3, (2, 3, 3)),
        ([9, 1, 1, 1, 1], 3, (1, 2, 2)),  # any cut has a 9: the rest is even
        ([0, 0, 0], 3, (1, 1, 1)),
    ],
)
def test_stage_cuts_equal_those_by_hand(costs, chunks, sizes):
    assert balanced(costs, chunks) == sizes


def test_the_best_cut_equals_brute_force():
    """Compare with every possible cut: the smallest maximum, and among those the smallest sum of squares."""
    draw = random.Random(7)
    for _ in range(400):
        costs = [draw.choice([0, 1, 1, 2, 3, 5, 50]) for _ in range(draw.randint(1, 9))]
        chunks = draw.randint(1, len(costs))
        cuts = itertools.combinations(range(1, len(costs)), chunks - 1)
        best = min(_badness(costs, (0, *borders, len(costs))) for borders in cuts)
        sizes = balanced(costs, chunks)
        assert len(sizes) == chunks
        assert min(sizes) >= 1
        assert _badness(costs, (0, *itertools.accumulate(sizes))) == best


def _badness(costs: list[int], borders: tuple[int, ...]) -> tuple[int, int]:
    sums = [sum(costs[start:end]) for start, end in itertools.pairwise(borders)]
    return max(sums), sum(total**2 for total in sums)


def test_layer_costs_equal_those_by_hand():
    mamba, mlp, attention, _, last = layer_costs(architecture(MODEL), seq_len=4)
    # in 8 -> 32, x_proj 16 -> 1 + 2 + 2, dt_proj 1 -> 16, out 16 -> 8; convolution; scan, 80 times
    mamba_cost = 2 * (8 * 32 + 16 * 5 + 16 + 16 * 8) + 2 * 4 * 16 + 80 * 7 * 16 * 2
    assert mamba == mamba_cost + 80 * 2 * 8  # the lookup reads and adds the width
    assert mlp == 6 * 8 * 16
    assert attention == 8 * 8 * 8 + 4 * 8 * 2.5
    assert last == mamba_cost + 2 * 8 * 16 + 80 * 5 * 16
    assert (embedding_cost(MODEL), head_cost(MODEL)) == (mamba - mamba_cost, last - mamba_cost)


def test_scan_costs_follow_published_speeds():
    """Samba, Table 3: at 1.3B on H100 Mamba trains at 17.8 / 25.9 of Llama-2's speed, Samba at 25.2 / 25.9."""
    whole = {
        name: sum(layer_costs(architecture(load([f"recipe={name}_1.3b"]).model), 4096))
        for name in ("llama2", "mamba", "samba")
    }
    assert whole["llama2"] / whole["mamba"] == pytest.approx(17.8 / 25.9, rel=0.02)
    assert whole["llama2"] / whole["samba"] == pytest.approx(25.2 / 25.9, rel=0.02)


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (5, 1), (7, 1), (4, 2), (3, 3), (36, 1)])
def test_every_layer_is_in_one_stage(pipeline, virtual):
    model = load(["recipe=samba_1.3b"]).model
    stages = stage_layers(architecture(model), ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual), 4096)
    assert len(stages) == pipeline * virtual
    assert all(stages)
    assert [layer for stage in stages for layer in stage] == list(range(36))


def test_odd_numbers_of_layers_are_cut_completely():
    stages = stage_layers(architecture(MODEL), ParallelConfig(pipeline=2), 4)
    assert [layer for stage in stages for layer in stage] == [0, 1, 2, 3, 4]


def test_bars_in_the_pattern_override_balance():
    model = dataclasses.replace(MODEL, pattern="M|-W-|M")
    assert stage_layers(architecture(model), ParallelConfig(pipeline=3), 4) == (range(1), range(1, 4), range(4, 5))
    assert stage_layers(architecture(model), ParallelConfig(), 4) == (range(5),)  # one stage ignores them


def test_virtual_stages_go_round_the_ranks():
    parallel = ParallelConfig(pipeline=3, virtual_pipeline=2)
    assert [list(chunks_on(parallel, rank)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_the_longest_phase_decides_the_cut():
    phases = "phases=[{name: a, tokens: 1M, seq_len: 64, global_batch: 16, lr: 1e-3},"
    config = load([phases + "{name: b, tokens: 1M, seq_len: 4096, global_batch: 16, lr: 1e-3}]", "parallel.pipeline=2"])
    arch = architecture(config.model)
    assert stages_of(arch, config) == stage_layers(arch, config.parallel, 4096)


@pytest.mark.parametrize(
    ("pattern", "key", "code", "cure"),
    [
        ("M-W", "parallel.pipeline", "out-of-range", "at most 3"),
        ("M|-|W|-|M|-", "model.pattern", "conflict", "pipeline=3 virtual_pipeline=2 or pipeline=2"),
    ],
)
def test_an_impossible_number_of_stages_is_refused(pattern, key, code, cure):
    with pytest.raises(ConfigError) as caught:
        stage_layers(architecture(dataclasses.replace(MODEL, pattern=pattern)), ParallelConfig(pipeline=4), 4)
    (problem,) = caught.value.problems
    assert (problem.key, problem.code) == (key, code)
    assert cure in problem.message


def test_data_parallelism_takes_the_remaining_ranks():
    parallel = ParallelConfig(tensor=2, pipeline=3)
    assert data_parallel(parallel, 24) == 4
    with raises_code(ConfigError, "not-divisible", "18 or 24"):
        data_parallel(parallel, 20)


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ({}, 1),
        ({"RANK": "1", "WORLD_SIZE": "8"}, 8),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, 16),
        ({"SLURM_NTASKS": "16"}, 1),  # inside an allocation, but not started by srun
        ({"RANK": "0", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, 4),
    ],
)
def test_the_launcher_sets_the_number_of_processes(environment, processes):
    assert launched(environment).world_size == processes
