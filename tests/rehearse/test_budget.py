"""A budget notices growth: planted waits, copies, larger activations, and lost implementations."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.cli import rehearse
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.planning.memory import largest_phase, plan
from hybridtron.rehearse import budget as budgets
from hybridtron.rehearse.budget import FOLDER, budget_of, exceeded, read
from hybridtron.sweep.grid import read as read_sweep
from tests.rehearse.programs import ROOT

FILES = sorted(FOLDER.glob("*.json"))

REPORT: dict[str, Any] = {
    "implementations": {"swiglu": "triton", "attention": "flash-attn"},
    "per_micro_batch": {"costs": [{"launches": 600.0}, {"launches": 34.0}], "waits": 0.0},
    "once": {"costs": [{"launches": 20.0}], "waits": 1.0},
    "other_bytes_per_token": 4.4e6,
    "sent": [["a.py:1", "all_reduce", 8, False, True, 3, 9000], ["b.py:1", "broadcast", 8, False, False, 1, 10]],
    "memory": {"peak": 35_000_000_000},
}
GROWN = {
    "a wait in every micro-batch": (
        ("per_micro_batch", "waits"),
        1.0,
        "waits per micro-batch: 1, above the budget of 0",
    ),
    "a wait once a step": (("once", "waits"), 2.0, "waits once: 2, above the budget of 1"),
    "a copy": (("other_bytes_per_token",), 4.5e6, "other bytes per token: 4,500,000, above the budget of 4,400,000"),
    "a collective that nothing hides": (("sent", 0, 4), False, "exposed bytes: 9,010, above the budget of 10"),
    "a larger activation": (
        ("memory", "peak"),
        36_000_000_000,
        "peak bytes: 36,000,000,000, above the budget of 35,000,000,000",
    ),
    "a launch": (("once", "costs"), [{"launches": 21.0}], "launches once: 21, above the budget of 20"),
    "a lost kernel": (("implementations", "swiglu"), "recomputed", "swiglu runs by recomputed, not by triton"),
}


@pytest.mark.parametrize("name", GROWN)
def test_values_over_the_budget_are_named(name: str) -> None:
    (*outer, key), value, line = GROWN[name]
    report = inner = copy.deepcopy(REPORT)
    for step in outer:
        inner = inner[step]
    inner[key] = value
    assert exceeded(budget_of(report), budget_of(REPORT)) == [line]


def test_values_below_the_budget_are_accepted() -> None:
    report = copy.deepcopy(REPORT)
    report["other_bytes_per_token"] = 4.0e6
    report["memory"]["peak"] = 30_000_000_000
    assert exceeded(budget_of(report), budget_of(REPORT)) == []


def test_ops_newer_than_the_budget_are_accepted() -> None:
    report = copy.deepcopy(REPORT)
    report["implementations"]["delta_scan"] = "chunked"
    assert exceeded(budget_of(report), budget_of(REPORT)) == []
    assert exceeded(budget_of(REPORT), budget_of(report)) == ["delta_scan runs by None, not by chunked"]


def test_budget_of_other_settings_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budgets, "FOLDER", tmp_path)
    settings = ["recipe=laptop", "precision=bf16"]
    assert rehearse.budget("laptop", settings, REPORT, writes=True) == 0
    assert read(budgets.path_of("laptop")) == (settings, budget_of(REPORT))
    assert rehearse.budget("laptop", settings[::-1], REPORT, writes=False) == 0
    assert rehearse.budget("laptop", settings[:1], REPORT, writes=False) == 2
    assert "precision=bf16" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_run_is_within_its_budget(path: Path) -> None:
    """No number in a budget is a time, so no kernel need be compiled."""
    pytest.importorskip("triton")
    asked = ["rehearse", *read(path)[0], "--gpu", "h200", "--no-kernels", "--budget", "check"]
    command = [sys.executable, "-m", "hybridtron", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_every_budget_has_the_same_keys_and_the_name_of_its_run() -> None:
    assert len(FILES) >= 3
    for path in FILES:
        settings, budget = read(path)
        assert budget.keys() == budget_of(REPORT).keys()
        assert budgets.path_of(load(settings).run.name) == path


STUDY = "studies/sweeps/span"


def mixers_of(config: Config) -> str:
    """A model's kinds of sub-layers with all their options, of which numbers count as whether there are any."""
    specs = architecture(config.model).by_letter.values()
    return repr([(spec.kind, {name: _kind(value) for name, value in vars(spec).items()}) for spec in specs])


def _kind(value: Any) -> Any:
    if isinstance(value, bool | str | None):
        return value
    return type(value).__name__


def runs_of_the_study() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the runs of every sweep, without the keys for texts and initial weights, which change no step."""
    for path in sorted((ROOT / STUDY).glob("*.yaml")):
        for run in read_sweep(path).runs:
            yield (
                f"{path.stem} {run.name}",
                [setting for setting in run.settings if not setting.startswith(("run.weights=", "data="))],
            )


@pytest.mark.slow
def test_every_run_of_the_span_study_is_valid_and_planned() -> None:
    for what, settings in runs_of_the_study():
        config = load(settings)
        assert check(RunPlan.of(config)) == [], what
        assert plan(largest_phase(RunPlan.of(config)), 1).ranks, what


def test_budgets_hold_every_kind_of_attention_of_the_span_study() -> None:
    """Each of its recipes also has a budget without adapters."""
    held = [load(read(path)[0]) for path in FILES if "_span" in path.stem]
    mixers = {(config.model.width, mixers_of(config)) for config in held}
    wanted = {what: load(settings) for what, settings in runs_of_the_study()}
    assert not [what for what, config in wanted.items() if (config.model.width, mixers_of(config)) not in mixers]
    whole = {config.model.width for config in held if config.phases[0].adapters is None}
    assert {config.model.width for config in wanted.values()} <= whole
    assert {"hax_mamba_130m", "zamba2_1.2b_span"} < {path.stem for path in FILES}
