"""The first day on a GPU without one: every command is parsed by the program that would run it, nothing is launched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridtron.architecture.base import MixerSpec
from hybridtron.cli import audit, checkpoint, doctor
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.proving.audit import cases, table
from hybridtron.proving.gpu import acceptance, main, recipes
from hybridtron.proving.gpu.acceptance import AcceptanceStep
from hybridtron.rehearse import cards
from tests import test_gpu
from tests.mixers.test_contract import CASES

TWENTY_MINUTES = 20 * 60


def parsed(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Parse a command by its own parser; raise SystemExit or ConfigError for a wrong option or key."""
    if command[1:3] == ("-m", "pytest"):
        files = [word for word in command if word.endswith(".py")]
        assert all((Path(__file__).parents[2] / file).is_file() for file in files)
        return "pytest"
    name = command[3]
    arguments = list(command[4:])
    if name == "train":
        assert check(RunPlan.of(load(arguments)), 1) == []
    elif name == "check" and arguments[0] == "gpu":
        assert main.parse(arguments[1:]).only
    elif name == "check":
        monkeypatch.setattr(cards, "choices_of", lambda _: ())  # none is written
        assert cards.main(arguments[1:]) == 0
    elif name == "checkpoint":
        seen: list[str] = []
        monkeypatch.setattr("hybridtron.cli.checkpoint_commands.run", lambda chosen: seen.append(chosen.command) or 0)
        assert checkpoint.main(arguments) == 0
        assert seen == ["diff"]
    elif name == "audit":
        chosen = audit.parse(arguments)
        assert chosen.gpus
        assert list(table.cases_of(chosen)) == list(cases.table())
    else:
        assert (name, arguments) == ("doctor", [])
        assert callable(doctor.main)
    return name


def test_every_command_of_day_one_has_valid_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [parsed(step.command, monkeypatch) for step in acceptance.steps(tmp_path, gpus=8)]
    assert set(names) == {"doctor", "check", "pytest", "train", "checkpoint", "audit"}


def test_day_one_takes_at_most_twenty_minutes(tmp_path: Path) -> None:
    assert sum(step.limit_s for step in acceptance.steps(tmp_path)) <= TWENTY_MINUTES


@pytest.mark.parametrize(("failing", "code", "difference"), [(None, 0, 0.0), ("the same weights", 1, None)])
def test_results_of_all_steps_are_listed(
    failing: str | None, code: int, difference: float | None, tmp_path: Path
) -> None:
    """Launches are answered by nobody; the whole run is there when the resumed one begins."""
    folder = tmp_path / "day"
    launched: list[str] = []
    by_command = {step.command: step for step in acceptance.steps(folder)}

    def launch(command: Sequence[str], log: Path, limit_s: float) -> int:
        step: AcceptanceStep = by_command[tuple(command)]
        if step.name == "whole":
            for number in (100, 200):
                (folder / "whole/checkpoints" / f"step-{number:08d}").mkdir(parents=True)
        if step.name == "resumed":
            assert [path.name for path in (folder / "resumed/checkpoints").iterdir()] == ["step-00000100"]
        launched.append(step.name)
        assert limit_s == step.limit_s
        return int(step.name == failing)

    assert acceptance.run_acceptance(folder, tmp_path / "cards", launch) == code
    assert launched == [step.name for step in acceptance.steps(folder)]
    table = (folder / "day_one.md").read_text()
    assert all(f"| {name} | {int(name == failing)} |" in table for name in launched)
    assert json.loads((tmp_path / "cards/measured/laptop.json").read_text()) == {"resume_difference": difference}


def test_step_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    assert acceptance.run_command(["sleep", "60"], tmp_path / "log", 0.1) == 124
    assert acceptance.run_command(["no-such-program"], tmp_path / "log", 1) == acceptance.NO_PROGRAM


@pytest.mark.parametrize(("unit", "rows"), [(1e9, 8), (0.25e9, 2), (1e6, 1)])
def test_rows_are_reduced_until_a_recipe_fits(unit: float, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use all rows on 80 GB, of which 35 GB are planned; use fewer on a quarter of that memory."""
    monkeypatch.setattr(recipes, "GB", unit)
    assert load(["recipe=samba_421m"]).phases[0].micro_batch == 8
    assert recipes.fitting("samba_421m", quick=False)[-1] == f"phases.0.global_batch={rows}"


def test_card_has_a_line_for_every_measurement() -> None:
    assert set(recipes.LINES_WRITTEN) | {"resume_difference", "megatron_mfu"} == set(cards.LINES)


@pytest.mark.parametrize("spec", CASES)
def test_gpu_tests_of_mixers_run_on_a_cpu(spec: MixerSpec) -> None:
    """Seldom does a machine run them; here they compare the CPU's forms with the references."""
    test_gpu.test_mixers_equal_the_cpu(spec)
