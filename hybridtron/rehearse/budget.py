"""Cost budgets for recipes: a step that costs more than its budget is a regression.

Costs are numbers from a rehearsal (a training step that is simulated without a GPU): for example, launches, bytes, and
peak memory. A budget is stored in a small JSON file, so that a diff shows its changes. The file contains the settings
of the rehearsed run (a recipe, or a variant of a recipe with another `run.name`), and the costs of its step. Lower
costs pass the check, but become the new limits only when the file is written again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridtron.resources import shipped

FOLDER = shipped("benchmarks") / "rehearsed"
SETTINGS = "settings"
SLACK = 1.001  # maximum ratio of bytes to their budget; versions of torch differ in a few small operations


def path_of(name: str) -> Path:
    """Return the budget file's path for a run's name: `ablations-a.json` for `ablations/a`."""
    return FOLDER / f"{name.replace('/', '-')}.json"


def budget_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return the budget of a rehearsal: each op's implementation, and the costs that must not grow.

    `report` is the result of `report.as_json`.
    """
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


def exceeded(costs: dict[str, Any], budget: dict[str, Any]) -> list[str]:
    """Return a line for each cost above its budget, and for each op with another implementation than in the budget.

    Ops that are not in the budget may have any implementation.
    """
    lines = [
        f"{op} runs by {costs['implementations'].get(op)}, not by {name}"
        for op, name in budget["implementations"].items()
        if costs["implementations"].get(op) != name
    ]
    for key, limit in budget.items():
        if key.endswith(("bytes", "per token")):
            allowed = limit * SLACK
        else:
            allowed = limit
        if key != "implementations" and costs[key] > allowed:
            lines.append(f"{key}: {costs[key]:,}, above the budget of {limit:,}")
    return lines


def read(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the settings and the budget in a budget file."""
    stored = json.loads(path.read_text())
    return stored.pop(SETTINGS), stored


def write(name: str, settings: Sequence[str], budget: dict[str, Any]) -> Path:
    """Write the budget file for these settings, and return its path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = path_of(name)
    path.write_text(json.dumps({SETTINGS: list(settings), **budget}, indent=2) + "\n")
    return path
