"""A supervised run survives each ordeal inside one launch, and ends as an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtron.proving.chaos import ordeals
from hybridtron.proving.chaos.main import unequal
from hybridtron.proving.chaos.ordeals import ORDEALS, placed, run_supervised, wrong
from hybridtron.proving.chaos.training_run import Run, write_data
from hybridtron.train.supervisor import faults

STEPS = 24

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "data"
    write_data(folder)
    return folder


def run_in(home: Path, data: Path) -> Run:
    home.mkdir()
    return Run(home, ordeals.arguments(data, STEPS), STEPS)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_in(tmp_path_factory.mktemp("peace") / "home", data)
    assert run_supervised(run, {}) == [0, 0, 0]
    assert faults.read(run.folder) == []
    return run


@pytest.mark.parametrize("ordeal", ORDEALS)
def test_run_continues_inside_its_launch(ordeal: str, undisturbed: Run, data: Path, tmp_path: Path) -> None:
    run = run_in(tmp_path / "home", data)
    codes = run_supervised(run, placed([ordeal]))
    assert wrong(run, placed([ordeal]), codes) == [], (run.home / "task-0.log").read_text()
    assert unequal(undisturbed, run) == []
    (fault,) = faults.read(run.folder)
    assert fault.spare == ("n3" if ordeal in ("lost node", "corrupt") else "")
    assert fault.resumed == 14
    print(faults.words([fault]))
    assert "time lost by cause" in (run.home / "task-0.log").read_text()
    assert not list(run.folder.glob(".supervisors*"))
