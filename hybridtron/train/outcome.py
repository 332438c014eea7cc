"""outcome.json: how a run ended, and how far it had come.

It is what requeue logic reads, since launchers don't pass on exit codes. It says `outcome` (finished, preempted or
failed), the last `step` and its `loss`, the last `validation` losses, the newest `checkpoint`, how many `seconds` this
start took and when it `ended`; if it did not finish, the `reason`, and of a failure the `rank` that failed first. What
is not known is left out. A finished run whose exports failed lists them under `failed_exports`, by the names of their
phases. A run that was killed before it could write has none.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from hybridtron.train.records import read_record

FILE = "outcome.json"


@dataclass
class Progress:
    """How far a run has come; times are in seconds on the monotonic clock."""

    step: int | None = None
    loss: float | None = None
    tokens: int = 0
    validation: Mapping[str, float] | None = None
    began: float = field(default_factory=time.monotonic)


def record_exports(run_dir: Path, failed: Mapping[str, str]) -> None:
    """Update the outcome of a run that had finished before, whose exports were tried again."""
    path = run_dir / FILE
    found = read_record(path) or {"outcome": "finished"}
    if failed or "failed_exports" in found:
        found.pop("failed_exports", None)
        path.write_text(json.dumps(found | ({"failed_exports": dict(failed)} if failed else {})))


def finite(value: Any) -> Any:
    """With null for a number that JSON can't hold."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def clock(seconds: float) -> str:
    """`1:02:03`, or with days before it."""
    return str(timedelta(seconds=round(seconds)))
