"""The sweeps of the length paper's figures: every run can start, and has the paper's tokens."""

from __future__ import annotations

from pathlib import Path

from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.sweep.grid import read

FIGURES = Path(__file__).parents[2] / "studies" / "sweeps" / "length"
STEP = 2**19  # tokens


def configs_of(name: str) -> dict[str, Config]:
    """Every run of a sweep, checked."""
    configs = {run.name: load([*run.settings]) for run in read(FIGURES / f"{name}.yaml").runs}
    assert [problem for config in configs.values() for problem in check(RunPlan.of(config))] == []
    assert {config.phases[0].seq_len * config.phases[0].global_batch for config in configs.values()} == {STEP}
    return configs


def test_figure_2_trains_three_sizes_with_four_contexts() -> None:
    phases = [(config.phases[0], config.model.width) for config in configs_of("contexts").values()]
    runs = {(phase.tokens, phase.seq_len, width) for phase, width in phases}
    sizes = (("22.5B", 512), ("34B", 768), ("25B", 768))
    assert runs == {(tokens, context, width) for tokens, width in sizes for context in (256, 512, 1024, 2048)}


def test_figure_3_keeps_a_checkpoint_at_every_multiple_of_chinchilla() -> None:
    (config,) = configs_of("checkpoints").values()
    assert (config.phases[0].tokens, config.phases[0].seq_len) == ("34B", 1024)
    assert config.checkpoint.keep_every == "4.25B"  # 2.5 times 20 tokens a parameter of 85M


def test_figure_11_has_two_warm_ups() -> None:
    runs = configs_of("warmup").values()
    assert {config.optim.warmup for config in runs} == {"10%", "25%"}
    phases = [(config.phases[0], config.model.width) for config in runs]
    assert {(phase.tokens, phase.seq_len, width) for phase, width in phases} == {("9B", 1024, 512)}
