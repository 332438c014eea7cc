"""A budget sees what grows: planted waits, copies, larger activations, and implementations that are lost."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest

from hybridtron.rehearse.budget import FOLDER, budget_of, exceeded
from tests.rehearse.programs import ROOT

REPORT: dict[str, Any] = {
    "implementations": {"swiglu": "triton", "attention": "flash-attn"},
    "per_micro_batch": {"costs": [{"launches": 600.0}, {"launches": 34.0}], "waits": 0.0},
    "once": {"costs": [{"launches": 20.0}], "waits": 1.0},
    "other_bytes_per_token": 4.4e6,
    "sent": [["a.py:1", "all_reduce", 8, False, True, 3, 9000], ["b.py:1", "broadcast", 8, False, False, 1, 10]],
    "memory": {"peak": 35_000_000_000},
}
GROWN = {
    "a wait in every micro-batch": (("per_micro_batch", "waits"), 1.0, "waits per micro-batch: 1, of 0"),
    "a wait once a step": (("once", "waits"), 2.0, "waits once: 2, of 1"),
    "a copy": (("other_bytes_per_token",), 4.5e6, "other bytes per token: 4,500,000, of 4,400,000"),
    "a collective that nothing hides": (("sent", 0, 4), False, "exposed bytes: 9,010, of 10"),
    "a larger activation": (("memory", "peak"), 36_000_000_000, "peak bytes: 36,000,000,000, of 35,000,000,000"),
    "a launch": (("once", "costs"), [{"launches": 21.0}], "launches once: 21, of 20"),
    "a lost kernel": (("implementations", "swiglu"), "recomputed", "swiglu runs by recomputed, not by triton"),
}


@pytest.mark.parametrize("name", GROWN)
def test_what_grows_is_named(name: str) -> None:
    (*outer, key), value, line = GROWN[name]
    report = inner = copy.deepcopy(REPORT)
    for step in outer:
        inner = inner[step]
    inner[key] = value
    assert exceeded(budget_of(report), budget_of(REPORT)) == [line]


def test_what_falls_is_no_fault() -> None:
    report = copy.deepcopy(REPORT)
    report["other_bytes_per_token"], report["memory"]["peak"] = 4.0e6, 30_000_000_000
    assert exceeded(budget_of(report), budget_of(REPORT)) == []


def test_an_op_that_is_newer_than_the_budget_is_no_fault() -> None:
    report = copy.deepcopy(REPORT)
    report["implementations"]["delta_scan"] = "chunked"
    assert exceeded(budget_of(report), budget_of(REPORT)) == []
    assert exceeded(budget_of(REPORT), budget_of(report)) == ["delta_scan runs by None, not by chunked"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("recipe", [path.stem for path in sorted(FOLDER.glob("*.json"))])
def test_a_recipe_is_within_its_budget(recipe: str) -> None:
    """No number in a budget is a time, so no kernel need be compiled."""
    pytest.importorskip("triton")
    asked = ["rehearse", f"recipe={recipe}", "--gpu", "h200", "--no-kernels", "--budget", "check"]
    command = [sys.executable, "-m", "hybridtron", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_every_budget_has_the_same_keys() -> None:
    files = sorted(FOLDER.glob("*.json"))
    assert len(files) >= 3
    assert all(json.loads(file.read_text()).keys() == budget_of(REPORT).keys() for file in files)
