"""Cost budgets of recipes: a step that costs more than its budget is a regression.

A budget is a small JSON file, so that its changes show as a readable diff. It stores the settings that it belongs to (a
recipe, or a recipe's variant with its own `run.name`) and the step's costs at that time. Lower costs are accepted; to
enforce them, write the file again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridtron.shipped import shipped

FOLDER = shipped("benchmarks") / "rehearsed"
SETTINGS = "settings"
SLACK = 1.001  # factor for bytes: torch's versions differ in a few small operations


def path_of(name: str) -> Path:
    """Return the budget file for the name of a run: `ablations/a` is stored in `ablations-a.json`."""
    return FOLDER / f"{name.replace('/', '-')}.json"


def budget_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return the values in a report (`report.as_json`) that must not grow."""
    costs = report["per_micro_batch"]["costs"]
    return {
        "implementations": report["implementations"],
        "launches per micro-batch": round(sum(cost["launches"] for cost in costs)),
        "launches once": round(sum(cost["launches"] for cost in report["once"]["costs"])),
        "waits per micro-batch": round(report["per_micro_batch"]["waits"]),
        "waits once": round(report["once"]["waits"]),
        "other bytes per token": round(report["other_bytes_per_token"]),
        "exposed bytes": sum(size for *_, is_hidden, _, size in report["sent"] if not is_hidden),
        "peak bytes": report["memory"]["peak"],
    }


def exceeded(found: dict[str, Any], budget: dict[str, Any]) -> list[str]:
    """List the costs above the budget and the ops that run by another implementation. Ops without a budget may."""
    lines = [
        f"{op} runs by {found['implementations'].get(op)}, not by {name}"
        for op, name in budget["implementations"].items()
        if found["implementations"].get(op) != name
    ]
    for key, most in budget.items():
        if key.endswith(("bytes", "per token")):
            allowed = most * SLACK
        else:
            allowed = most
        if key != "implementations" and found[key] > allowed:
            lines.append(f"{key}: {found[key]:,}, of {most:,}")
    return lines


def read(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Read a budget file. Returns the settings that it belongs to, and the budget."""
    stored = json.loads(path.read_text())
    return stored.pop(SETTINGS), stored


def write(name: str, settings: Sequence[str], budget: dict[str, Any]) -> Path:
    """Write the budget file for these settings, and return its path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = path_of(name)
    path.write_text(json.dumps({SETTINGS: list(settings), **budget}, indent=2) + "\n")
    return path
