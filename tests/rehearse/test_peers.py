"""The page with other packages' kernels beside ours, and the counts of their launches."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridtron.proving.gpu.queue.contests import CONTESTS as QUEUE
from hybridtron.rehearse.peers import COLUMNS, CONTESTS, MODULES, PeerCost, PeerLaunches, page
from tests.rehearse.programs import PATIENT, ROOT

pytestmark = PATIENT
COST = PeerCost("ssd", "4x2048", "mamba-ssm", theirs=(41, 2e9), ours=(14, 1e9), modelled=1e-3, bandwidth=4e12)


def test_comparisons_are_those_of_the_queue() -> None:
    assert set(CONTESTS) <= set(QUEUE)


def test_different_tensors_of_a_launch_count_once() -> None:
    x, y = torch.empty(4), torch.empty(2, dtype=torch.bfloat16)
    named = SimpleNamespace(__name__="fwd")
    assert PeerLaunches().note(named, (1,), (x, x, None, 3), {"y": y}) == ("fwd", 16 + 4, 0)


def test_page_has_a_row_for_each_size_and_names_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtron.rehearse.peers.version", lambda package: "1.2")
    text = page("h200", [COST], ["fla-core"])
    assert "| ssd | 4x2048 | mamba-ssm | 41 | 14 | 2.00 | 1.00 | 0.50 | 0.25 | 1.00 |" in text
    assert "packages: mamba-ssm 1.2\n" in text
    assert "fla-core is not installed" in text
    assert len(COST.cells()) == len(COLUMNS)


@pytest.mark.slow
def test_command_without_packages_writes_a_page_that_names_them(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    if any(importlib.util.find_spec(module) for module in MODULES.values()):
        pytest.skip("a package is installed")
    command = [sys.executable, "-m", "hybridtron.rehearse.peers", str(tmp_path / "peers.md"), "--tiny"]
    subprocess.run(command, cwd=ROOT, check=True)
    text = (tmp_path / "peers.md").read_text()
    assert all(f"{package} is not installed" in text for package in MODULES)


@pytest.mark.slow
def test_command_rehearses_installed_packages(tmp_path: Path) -> None:
    for module in ("triton", "einops", *MODULES.values()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    command = [sys.executable, "-m", "hybridtron.rehearse.peers", str(tmp_path / "peers.md"), "--tiny"]
    subprocess.run([*command, *("--only", CONTESTS[0], "--only", CONTESTS[2])], cwd=ROOT, check=True)
    rows = [line for line in (tmp_path / "peers.md").read_text().splitlines() if "| tiny |" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| ssd", "| gla"]
    assert all(int(row.split(" | ")[3]) > 5 for row in rows)
