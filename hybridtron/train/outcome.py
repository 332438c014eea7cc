"""outcome.json: how a run ended, and how far it had come.

Requeue logic reads this file, since launchers don't pass on exit codes. Its keys, each left out if unknown:

    outcome                   finished, preempted or failed
    step, loss, validation    the last step, its loss, and the last held-out losses
    checkpoint                the newest checkpoint
    seconds, ended            how long this start took, and when it ended in UTC
    reason                    why the run did not finish
    rank                      the rank that failed first
    failed_exports            reasons by phase, if a finished run could not export them

A run that was killed before it could write leaves no such file.
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
    """Progress of a run. `began` is when this start began, in seconds on the monotonic clock."""

    step: int | None = None
    loss: float | None = None
    tokens: int = 0
    validation: Mapping[str, float] | None = None
    began: float = field(default_factory=time.monotonic)


def record_exports(run_dir: Path, failed: Mapping[str, str]) -> None:
    """Update outcome.json of a finished run after a retry of its exports; `failed` holds the reasons by phase."""
    path = run_dir / FILE
    outcome = read_record(path) or {"outcome": "finished"}
    if failed or "failed_exports" in outcome:
        outcome.pop("failed_exports", None)
        path.write_text(json.dumps(outcome | ({"failed_exports": dict(failed)} if failed else {})))


def finite(value: Any) -> Any:
    """Replace floats that are not finite by None, since JSON can't represent them; mappings are searched too."""
    if isinstance(value, Mapping):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def clock(seconds: float) -> str:
    """Format a duration as `1:02:03`, with days in front if there are any."""
    return str(timedelta(seconds=round(seconds)))
