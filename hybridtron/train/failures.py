"""Which rank failed first, and why: the line in outcome.json, and each rank's traceback in logs/error-RANK.txt.

The first process to make the file wins. A rank that fails while it waits for others (its peer went away, or never came)
is seldom the cause: it looks for a rank of its own machine that is gone or stopped, and waits briefly, so that
the rank at fault can report first. Of a rank that can't report (killed on another machine, or its interpreter stuck)
its peers report what they saw.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from hybridtron.config.checks.export import sealed_checkpoints
from hybridtron.train.outcome import FILE, Progress, finite
from hybridtron.train.records import read_record

GRACE_S = 2.0  # that a rank which waited for others waits for their reports
WAITING = ("/torch/distributed/", "/megatron/core/")  # where a rank's innermost calls are while it waits for others
PROC = Path("/proc")
LOG = logging.getLogger(__name__)


def process_fault(process: int) -> str | None:
    """What is wrong with a process of this machine; None also where the system can't show it."""
    if not PROC.is_dir():
        return None
    try:
        state = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "is gone: it was killed or crashed"
    return {"Z": "is gone: it was killed or crashed", "T": "is stopped (SIGSTOP)"}.get(state)


class FailedElsewhere(RuntimeError):
    """This rank failed because another one had."""


class Failures:
    """Records a failure of this rank."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir, self.rank = run_dir, rank
        self.places: list[tuple[str, int]] = []  # machine and process of every rank, when they have joined
        self.progress = Progress()

    def record_error(self, error: BaseException) -> FailedElsewhere | None:
        """Log an error's traceback and report it; what to raise in its place if another rank had failed first."""
        text = "".join(traceback.format_exception(error))
        self.log("error", text)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        first, reason = self.report(f"{type(error).__name__}: {error}", waits_for_others(reversed(frames)))
        if first == self.rank:
            return None
        return FailedElsewhere(f"rank {self.rank} ends, as rank {first} failed first: {reason}")

    def report(self, reason: str, waiting: bool) -> tuple[int, str]:
        """Make outcome.json, unless another rank did; the rank that failed first, and why."""
        rank = self.rank
        if waiting and (found := self._look_around()) is not None:
            rank, status = found
            reason = f"rank {rank} {status}; rank {self.rank} noticed by {reason}"
        if not self.record("failed", reason, rank):
            return self._reported() or (rank, reason)
        return rank, reason

    def record(
        self,
        outcome: str,
        reason: str | None = None,
        rank: int | None = None,
        failed_exports: Mapping[str, str] | None = None,
    ) -> bool:
        """Make outcome.json, if there is none; before the ranks have joined, it is of an earlier start."""
        words: dict[str, Any] = {"outcome": outcome, "reason": reason, "rank": rank, "failed_exports": failed_exports}
        words |= asdict(self.progress)
        del words["tokens"]  # metrics.jsonl has them
        words["seconds"] = round(time.monotonic() - words.pop("began"), 3)
        words["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):
            if sealed := sealed_checkpoints(self.run_dir):
                words["checkpoint"] = str(sealed[max(sealed)])
        text = json.dumps(finite({name: value for name, value in words.items() if value is not None}), allow_nan=False)
        try:
            with (self.run_dir / FILE).open("x" if self.places else "w") as file:
                file.write(text)
        except FileExistsError:
            return False
        except OSError as error:
            LOG.error("%s can't be written (%s): %s", FILE, error, text)
        return True

    def log(self, kind: str, text: str) -> None:
        """Add to logs/KIND-RANK.txt, with the time."""
        path = self.run_dir / "logs" / f"{kind}-{self.rank}.txt"
        with suppress(OSError), path.open("a") as file:  # a full disk must not hide what failed
            file.write(f"{datetime.now().isoformat(' ', 'seconds')} rank {self.rank}\n{text}\n")

    def _reported(self) -> tuple[int, str] | None:
        """What outcome.json says of a failure; it may be there a moment before its words are."""
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            if found := read_record(self.run_dir / FILE):
                return (found["rank"], found["reason"]) if found["outcome"] == "failed" else None
            time.sleep(0.05)
        return None

    def _look_around(self) -> tuple[int, str] | None:
        """A rank of this machine that is gone or stopped, unless another rank reports its own failure meanwhile."""
        here = self.places[self.rank][0] if self.places else None
        neighbours = [(rank, process) for rank, (host, process) in enumerate(self.places) if host == here]
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and not (self.run_dir / FILE).exists():
            for rank, process in neighbours:
                if (status := process_fault(process)) is not None:
                    return rank, status
            time.sleep(0.05)
        return None


def waits_for_others(frames: Iterable[FrameType]) -> bool:
    """Whether a stack, innermost call first, is inside a collective or a send or receive."""
    innermost = [frame.f_code.co_filename for _, frame in zip(range(4), frames, strict=False)]
    return any(part in name for name in innermost for part in WAITING)
