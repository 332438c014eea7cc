"""The gate of sparse attention that is chosen by content: on joint recall, HAX stands well above Mamba alone.

Both are 128 wide; the paper's Mamba alone is twice as wide as the model with attention. Where the branch adds nothing
the two are equal, and the gate fails. studies/joint_recall/README.md has the margins of two seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from hybridtron.cli.sweep import carried, steps_of
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import Sweep
from hybridtron.tasks.recall import row_length
from studies.joint_recall.runs import HERE, accuracy_on, write_tables
from studies.study import selected

ROWS = {42: "2-4,1-2", 74: "3-4,3-4"}  # tokens of a row without its end -> contexts and keys
TABLES = "2-4,2-4"  # that are asked
STEPS = 2000
TRAINING = {42: 32_000, 74: 48_000}  # rows by their length, of which a step takes 32
ASKED = 300
MARGIN = 0.1


def runs_of(folder: Path) -> tuple[Sweep, Folder]:
    """The runs of gate.yaml on rows in `folder`."""
    small, whole = (folder / str(length) for length in ROWS)
    rows = (f"data.path={small}", f"phases.1.data.path={whole}")
    return selected(HERE / "gate.yaml", folder / "runs", lambda _: rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hax_recalls_more_than_mamba_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two runs at a time
    for length, counts in ROWS.items():
        write_tables(length, counts, TRAINING[length], tmp_path / str(length))
    sweep, folder = runs_of(tmp_path)
    faults = [ended.fault for ended in carried(sweep, folder, 2, steps_of(sweep, folder), Console(stderr=True))]
    assert not any(faults), faults
    accuracies = {run.variant: accuracy_on(folder.of(run.name), max(ROWS), TABLES, ASKED) for run in sweep.runs}
    assert accuracies["mamba+HAX"] >= accuracies["mamba"] + MARGIN, accuracies


def test_the_gate_trains_two_models_of_one_width_for_2000_steps(tmp_path: Path) -> None:
    sweep, folder = runs_of(tmp_path)
    configs = {run.variant: load(list(run.settings)) for run in sweep.runs}
    assert set(configs) == {"mamba", "mamba+HAX"}
    for name, config in configs.items():
        assert check(RunPlan.of(config)) == [], name
        assert config.model.width == 128
        assert [phase.seq_len - 1 for phase in config.phases] == list(ROWS)
    assert steps_of(sweep, folder) == {run.name: STEPS for run in sweep.runs}
    mixers = [config.model.layers["M"] for config in configs.values()]
    assert {"sparse": mixers[1]["sparse"], **mixers[0]} == mixers[1]


@pytest.mark.parametrize(("length", "sizes"), [*ROWS.items(), (max(ROWS), TABLES)])
def test_rows_hold_the_largest_table(length: int, sizes: str) -> None:
    largest = [int(part.split("-")[1]) for part in sizes.split(",")]
    assert row_length(largest) == length
