"""Records of a failure: the first rank to fail in outcome.json, each rank's traceback in logs/error-RANK.txt.

The first process to create outcome.json wins. A rank that fails while it waits for others (its peer died, or never
joined) is seldom the cause. So it first looks for a rank on its own machine that is dead or stopped, and waits briefly
to let the rank at fault report first. If that rank can't report (it was killed on another machine, or its interpreter
is stuck), its peers report the failure that they observed.
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

GRACE_S = 2.0  # time for the rank at fault to report, before a rank that was waiting for it does
WAITING = ("/torch/distributed/", "/megatron/core/")  # files of the innermost calls of a rank that waits for others
PROC = Path("/proc")
LOG = logging.getLogger(__name__)


def process_fault(process: int) -> str | None:
    """Say if a process of this machine is dead or stopped. None if it is neither, or if there is no /proc to ask."""
    if not PROC.is_dir():
        return None
    try:
        state = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "is gone: it was killed or crashed"
    return {"Z": "is gone: it was killed or crashed", "T": "is stopped (SIGSTOP)"}.get(state)


class FailedElsewhere(RuntimeError):
    """Raised instead of an error that another rank's failure has caused."""


class Failures:
    """Records how this rank of a run ends: in outcome.json, and in its own files in logs/."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self.places: list[tuple[str, int]] = []  # host and process id of every rank; empty until all have joined
        self.progress = Progress()

    def record_error(self, error: BaseException) -> FailedElsewhere | None:
        """Log an error's traceback and report it.

        Returns the error to raise in its place if another rank had failed first, else None.
        """
        text = "".join(traceback.format_exception(error))
        self.log("error", text)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        first, reason = self.report(f"{type(error).__name__}: {error}", waits_for_others(reversed(frames)))
        if first == self.rank:
            return None
        return FailedElsewhere(f"rank {self.rank} ends, as rank {first} failed first: {reason}")

    def report(self, reason: str, waiting: bool) -> tuple[int, str]:
        """Write a failure to outcome.json unless another rank has, and return which rank failed first and why.

        `waiting` says that this rank was waiting for others, so that the cause is looked for among its neighbours.
        """
        rank = self.rank
        if waiting and (failed := self._look_around()) is not None:
            rank, status = failed
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
        """Write outcome.json unless it exists; return False if it does.

        Until all ranks have joined, an existing file is from an earlier start and is overwritten. A file that can't be
        written is logged.
        """
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
        """Append a text to logs/KIND-RANK.txt, with the time."""
        path = self.run_dir / "logs" / f"{kind}-{self.rank}.txt"
        with suppress(OSError), path.open("a") as file:  # a full disk must not hide what failed
            file.write(f"{datetime.now().isoformat(' ', 'seconds')} rank {self.rank}\n{text}\n")

    def _reported(self) -> tuple[int, str] | None:
        """Return the rank and reason of a failure from outcome.json, or None.

        It waits for GRACE_S, since the file exists a moment before its content.
        """
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            if outcome := read_record(self.run_dir / FILE):
                if outcome["outcome"] == "failed":
                    return (outcome["rank"], outcome["reason"])
                return None
            time.sleep(0.05)
        return None

    def _look_around(self) -> tuple[int, str] | None:
        """Find a dead or stopped rank of this machine; return its number and status, or None after GRACE_S.

        The search ends early, with None, when another rank writes outcome.json.
        """
        own_host = self.places[self.rank][0] if self.places else None
        neighbours = [(rank, process) for rank, (host, process) in enumerate(self.places) if host == own_host]
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and not (self.run_dir / FILE).exists():
            for rank, process in neighbours:
                if (status := process_fault(process)) is not None:
                    return rank, status
            time.sleep(0.05)
        return None


def waits_for_others(frames: Iterable[FrameType]) -> bool:
    """Return True if a stack, innermost call first, is inside a collective, a send or a receive."""
    innermost = [frame.f_code.co_filename for _, frame in zip(range(4), frames, strict=False)]
    return any(part in name for name in innermost for part in WAITING)
