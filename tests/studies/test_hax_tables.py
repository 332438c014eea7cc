"""The sweeps of HAX's tables: every run can start, and has the paper's steps, rates and keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtron.config.check import check
from hybridtron.config.load import load, to_yaml
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config
from hybridtron.sweep.grid import SweepRun, read
from hybridtron.train.lr import learning_rate

TABLES = Path(__file__).parents[2] / "studies" / "sweeps" / "hax"
SIBLINGS = ("none", "D", "SW", "SW+D", "A", "LSH", "KS", "HAX")


def configs_of(name: str, folder: Path) -> dict[str, tuple[SweepRun, Config]]:
    """Return a sweep's runs by name, each with its checked configuration.

    Each configuration is saved, because runs that start from others read theirs.
    """
    configs = {}
    for run in read(TABLES / f"{name}.yaml").runs:
        imported = ["" if one == "run.weights=imported/mamba-130m" else one for one in run.settings]
        start = [] if run.start is None else [f"run.weights={folder / run.start}@best"]
        config = load([*filter(None, imported), *start])
        assert check(RunPlan.of(config)) == [], run.name
        (folder / run.name).mkdir()
        (folder / run.name / "config.yaml").write_text(to_yaml(config))
        configs[run.name] = run, config
    return configs


def rate_after(config: Config, step: int) -> float:
    phases = resolve(config)
    return learning_rate(phases, 0, step * phases[0].settings.tokens_per_step)


@pytest.mark.slow
def test_table_5_has_seventeen_models_at_three_rates_from_three_seeds(tmp_path: Path) -> None:
    runs = configs_of("joint_recall", tmp_path)
    assert len({run.variant for run, _ in runs.values()}) == 17
    assert len(runs) == 17 * 3 * 3
    for run, config in runs.values():
        options = config.model.layers["S"]
        sparse = options.get("sparse")
        assert config.model.width == (64 if sparse or run.variant == "samba" else 128)
        assert sparse is None or sparse["keys"] == 64
        assert (RunPlan.of(config).last_step, config.phases[0].global_batch, config.phases[0].seq_len) == (
            400_000,
            64,
            1059,
        )


def test_figure_5_continues_eight_models_after_200_steps_without_a_rate(tmp_path: Path) -> None:
    runs = configs_of("continual", tmp_path)
    assert tuple(runs) == SIBLINGS
    for _, config in runs.values():
        assert (RunPlan.of(config).last_step, config.phases[0].seq_len, config.phases[0].global_batch) == (
            50_000,
            2048,
            64,
        )
        rates = [rate_after(config, step) for step in (1, 200, 201, 50_000)]
        assert rates == [0, 0, pytest.approx(3e-4, rel=1e-3), pytest.approx(1e-5, rel=1e-4)]


def test_table_1_tunes_the_best_of_each_at_its_own_rate(tmp_path: Path) -> None:
    runs = configs_of("chat", tmp_path)
    assert tuple(runs) == (*SIBLINGS, *(f"{name}-chat" for name in SIBLINGS))
    for name in SIBLINGS:
        (_, before) = runs[name]
        (run, config) = runs[f"{name}-chat"]
        assert (RunPlan.of(before).last_step, before.phases[0].seq_len, rate_after(before, 200)) == (10_000, 3072, 0)
        assert (run.start, run.best) == (name, True)
        assert config.model == before.model
        assert RunPlan.of(config).last_step == 3000
        peak = 3e-6 if name in ("D", "LSH", "HAX") else 1e-5
        rates = [rate_after(config, step) for step in (200, 600, 1000, 3000)]
        assert rates == [0, pytest.approx(peak / 2), pytest.approx(peak), pytest.approx(peak)]
