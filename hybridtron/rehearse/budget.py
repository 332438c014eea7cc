"""What a recipe's step may cost, as it was when its budget was last written; what costs more is a regression.

A budget is a small file, so that a change of one shows as a readable difference. It names the settings that it is of, a
recipe's or those of a variant of one, under a `run.name` of its own. Numbers that fall are no fault; to hold the
better ones, the file is written again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridtron.shipped import shipped

FOLDER = shipped("benchmarks") / "rehearsed"
SETTINGS = "settings"
SLACK = 1.001  # of bytes: torch's versions differ in a few small operations


def path_of(name: str) -> Path:
    """The file of a run of this name: `ablations/a` lies in `ablations-a.json`."""
    return FOLDER / f"{name.replace('/', '-')}.json"


def budget_of(report: dict[str, Any]) -> dict[str, Any]:
    """The part of a report (`report.as_json`) that must not grow."""
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
    """What costs more than the budget, or runs by another implementation; ops that are newer than the budget may."""
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
    """The settings that a budget is of, and what must not grow."""
    found = json.loads(path.read_text())
    return found.pop(SETTINGS), found


def write(name: str, settings: Sequence[str], budget: dict[str, Any]) -> Path:
    """Hold these settings to this from now on."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = path_of(name)
    path.write_text(json.dumps({SETTINGS: list(settings), **budget}, indent=2) + "\n")
    return path
