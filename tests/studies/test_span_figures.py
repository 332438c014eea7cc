"""The sweeps of the Expansion Span paper's study: every run can start and is planned, and has the paper's numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.planning.memory import largest_phase, plan
from hybridtron.sweep.grid import read

FIGURES = Path(__file__).parents[2] / "studies" / "sweeps" / "span"
NODE = 8  # GPUs of the paper's machine
STEP = 2**19  # tokens
HELD = 80e9  # bytes of one GPU


def configs_of(name: str) -> dict[str, Config]:
    """Every run of a sweep, checked and planned for one node."""
    configs = {}
    for run in read(FIGURES / f"{name}.yaml").runs:
        imported = f"run.weights=imported/{'llama-7b' if name == 'llama' else 'mamba2attn-2.7b'}"
        assert imported in run.settings
        config = load([one for one in run.settings if one != imported])
        assert check(RunPlan.of(config), NODE) == [], run.name
        phase = largest_phase(RunPlan.of(config))
        assert (RunPlan.of(config).last_step, phase.settings.tokens_per_step) == (1000, STEP)
        assert all(0 < rank.memory.total < HELD for rank in plan(phase, NODE).ranks), run.name
        configs[run.name] = config
    return configs


def layer(config: Config) -> dict[str, Any]:
    return config.model.layers["X"]


@pytest.mark.slow
def test_table_1_has_four_kinds_of_attention_and_the_texts_of_tables_6_and_7() -> None:
    runs = configs_of("attention")
    kinds = {"full": ("attention", None), "SW": ("attention", 4096), "S2": ("span", None), "SE": ("span", None)}
    assert set(runs) == {f"{kind}-data={data}" for kind in kinds for data in ("language", "language_code", "pg19")}
    for name, config in runs.items():
        kind = name.partition("-")[0]
        assert (layer(config)["kind"], layer(config).get("window")) == kinds[kind]
        assert config.phases[0].lr == (2e-5 if kind == "S2" else 2e-4)
        assert config.phases[0].adapters.preset == "hylora"
    assert layer(runs["S2-data=pg19"])["memory"] == "shifted"
    shares = {name: source.weight for name, source in runs["SE-data=language_code"].data.mixture.items()}
    assert shares == {"language": 70, "code": 30}


@pytest.mark.slow
def test_figure_3_varies_what_is_read_of_the_past() -> None:
    assert {layer(config)["memory"] for config in configs_of("retrieval").values()} == {
        "none", "random", "landmark", "span",
    }  # fmt: skip
    assert [layer(config)["chunk"] for config in configs_of("chunks").values()] == [2048, 4096, [2048, 4096]]
    sizes = [(layer(config)["block"], layer(config)["blocks"]) for config in configs_of("blocks").values()]
    assert {block * blocks for block, blocks in sizes} == {256}
    assert (32, 8) in sizes
    assert {layer(config)["blocks"] for config in configs_of("past").values()} == {2, 4, 8, 16, 32}


def test_table_3_varies_what_learns_and_the_rank() -> None:
    presets = {(layer(config)["kind"], config.phases[0].adapters.preset) for config in configs_of("adapters").values()}
    assert presets == {(kind, name) for kind in ("span", "attention") for name in ("lora", "lora_plus", "hylora")}
    ranks = [config.phases[0].adapters for config in configs_of("ranks").values()]
    assert [(adapters.rank, adapters.alpha / adapters.rank) for adapters in ranks] == [(r, 2) for r in (8, 16, 32, 64)]


def test_figure_13_has_shifted_attention_at_two_rates() -> None:
    runs = configs_of("shifted").values()
    assert [(layer(config)["memory"], config.phases[0].lr) for config in runs] == [("shifted", 2e-5), ("shifted", 2e-4)]


def test_table_4_has_llama_with_interpolated_positions() -> None:
    runs = configs_of("llama")
    kinds = {"SW": ("attention", 2e-4), "S2": ("span", 2e-5), "SE": ("span", 2e-4)}
    assert {name: (layer(config)["kind"], config.phases[0].lr) for name, config in runs.items()} == kinds
    for config in runs.values():
        (phase,) = config.phases
        assert (phase.seq_len, phase.adapters.preset, phase.adapters.rank, phase.adapters.alpha) == (
            16384, "lora_plus", 8, 16,
        )  # fmt: skip
        assert layer(config)["rope"] == {"scale": "linear", "factor": 8}  # 16384 / 2048
        table = architecture(config.model).table
        assert sum(math.prod(weight.shape) for weight in table.values()) == 6_738_415_616  # Llama-1 7B's
    assert layer(runs["SW"])["window"] == layer(runs["S2"])["chunk"] == layer(runs["SE"])["chunk"] == 4096
    assert (layer(runs["SE"])["block"], layer(runs["SE"])["blocks"], layer(runs["S2"])["memory"]) == (32, 8, "shifted")
