"""outcome.json: how a run ended, and how far it had come.

Job scripts read this file to decide whether to start the run again: a launcher such as torchrun does not pass on the
exit codes of the processes that it started. Keys (a key with an unknown value is left out):

    outcome           finished, failed, or preempted (stopped on request after saving a checkpoint)
    step              the last step
    loss              the last step's loss
    validation        the last held-out losses
    checkpoint        the newest checkpoint's path
    seconds           the time since this process began
    ended             the date and time of the end, in UTC
    reason            why the run did not finish
    rank              the rank that failed first; -1 if no single rank is at fault
    corrupt           true if the rank's state, weights or gradients were corrupt
    failed_exports    phase -> reason why its export failed; only if training is finished

A run whose processes are killed leaves no outcome.json. Each rank that fails with an error writes its traceback to
logs/error-RANK.txt.

The first rank that fails creates outcome.json, and the other ranks leave the file unchanged. A rank that fails while it
waits for another rank is seldom the cause: usually the other rank has died, or never joined. So a waiting rank does not
report its failure immediately. For up to GRACE_S seconds it searches its own machine for a dead or stopped rank, and
reports such a rank as the first rank that failed. Meanwhile a rank on another machine has time to report a failure. If
GRACE_S seconds pass without result, the waiting rank reports its own failure.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import logging
import math
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from hybridtron.config.checks.export import sealed_checkpoints
from hybridtron.problems import ConfigError
from hybridtron.train.jsonl import read_record, write_whole

FILE = "outcome.json"
EXIT_PREEMPTED = 75  # exit code of a preempted run: EX_TEMPFAIL in sysexits.h, which means "try again"
GRACE_S = 2.0  # seconds that a waiting rank gives to the rank that caused the failure
WAITING = ("/torch/distributed/", "/megatron/core/")  # folders with code in which a rank waits for other ranks
PROC = Path("/proc")
LOG = logging.getLogger(__name__)


class Preempted(Exception):
    """Raised by all ranks after the same step, when the run was asked to stop and has written a checkpoint."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(
            f"preempted at step {step} ({reason}); the checkpoint is written: run the same command again to continue"
        )
        self.step = step
        self.reason = reason


class ExportsFailed(Exception):
    """Raised when training is complete, but work by hooks has failed, such as exports.

    `failed` maps the name of the work to the reason. The name of an export is its phase's name.
    """

    def __init__(self, failed: Mapping[str, str]) -> None:
        why = "".join(f"\n  {name}: {reason}" for name, reason in failed.items())
        super().__init__(f"training is complete, but not exported; run the same command again to retry:{why}")
        self.failed = dict(failed)


class CorruptRank(RuntimeError):
    """Raised on all ranks if the state, weights or gradients of a rank are corrupt (`corruption.py`).

    `rank` is the rank at fault; -1 if it is unknown which of several ranks it is.
    """

    def __init__(self, what: str, rank: int) -> None:
        super().__init__(what)
        self.rank = rank


class FailedElsewhere(RuntimeError):
    """Raised by a rank in place of its own error if another rank failed earlier."""


@dataclass
class Progress:
    """Progress of a run.

    step: the last step; None before the first step
    loss: the last step's loss
    tokens: the number of tokens that the run has read
    validation: the last held-out losses, by multiple of the training length (`1x`)
    began: the time at which this process began, in seconds on the monotonic clock
    """

    step: int | None = None
    loss: float | None = None
    tokens: int = 0
    validation: Mapping[str, float] | None = None
    began: float = field(default_factory=time.monotonic)


class Failures:
    """Records how this rank ends, in outcome.json and in logs/."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        # index of the node and process id of every rank; empty until all ranks have joined
        self.processes: list[tuple[int, int]] = []
        self.started = 0.0  # rank 0's clock when all ranks had joined, in seconds since 1970, on all ranks
        self.progress = Progress()

    def record_error(self, error: BaseException) -> FailedElsewhere | None:
        """Write an error's traceback to logs/error-RANK.txt, and report the error in outcome.json.

        If another rank failed first, return a FailedElsewhere error that the caller must raise in place of `error`. If
        this rank failed first, return None.
        """
        text = "".join(traceback.format_exception(error))
        self.log("error", text)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        first, reason = self.report(f"{type(error).__name__}: {error}", waits_for_others(reversed(frames)))
        if first == self.rank:
            return None
        return FailedElsewhere(f"rank {self.rank} ends because rank {first} failed first: {reason}")

    def report(self, reason: str, waiting: bool) -> tuple[int, str]:
        """Write a failure to outcome.json unless the file exists; return the rank that failed first and the reason.

        `waiting` is True if this rank failed while it waited for other ranks. In this case, if a rank on this machine
        is dead or stopped, that rank is reported as the first rank that failed.
        """
        rank = self.rank
        if waiting and (failed := self._find_faulty_rank()) is not None:
            rank, fault = failed
            reason = f"rank {rank} {fault}; rank {self.rank} observed: {reason}"
        if not self.record("failed", reason, rank):
            return self._reported() or (rank, reason)
        return rank, reason

    def record(
        self,
        outcome: str,
        reason: str | None = None,
        rank: int | None = None,
        failed_exports: Mapping[str, str] | None = None,
        corrupt: bool | None = None,
    ) -> bool:
        """Write outcome.json unless it exists; return False if it exists.

        Before all ranks have joined, an existing file is from an earlier start of the run and is overwritten. If the
        file can't be written, its content is logged as an error, and the result is True.
        """
        fields: dict[str, Any] = {"outcome": outcome, "reason": reason, "rank": rank, "failed_exports": failed_exports}
        fields["corrupt"] = corrupt
        fields |= asdict(self.progress)
        del fields["tokens"]  # metrics.jsonl has the number of tokens
        fields["seconds"] = round(time.monotonic() - fields.pop("began"), 3)
        fields["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):
            if sealed := sealed_checkpoints(self.run_dir):
                fields["checkpoint"] = str(sealed[max(sealed)])
        text = json.dumps(finite({name: value for name, value in fields.items() if value is not None}), allow_nan=False)
        try:
            with (self.run_dir / FILE).open("x" if self.processes else "w") as file:
                file.write(text)
        except FileExistsError:
            return False
        except OSError as error:
            LOG.error("%s can't be written (%s): %s", FILE, error, text)
        return True

    def log(self, kind: str, text: str) -> None:
        """Append a text to logs/KIND-RANK.txt, under a line with the time and the rank."""
        path = self.run_dir / "logs" / f"{kind}-{self.rank}.txt"
        with suppress(OSError), path.open("a") as file:  # a full disk must not hide the error that is being logged
            file.write(f"{datetime.now().isoformat(' ', 'seconds')} rank {self.rank}\n{text}\n")

    def _reported(self) -> tuple[int, str] | None:
        """Return the rank and the reason of the failure in outcome.json; None if the file reports no failure.

        Another rank may have created the file, but not yet written to it. So this method waits up to GRACE_S seconds
        until the file has content.
        """
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            if outcome := read_record(self.run_dir / FILE):
                if outcome["outcome"] == "failed":
                    return (outcome["rank"], outcome["reason"])
                return None
            time.sleep(0.05)
        return None

    def _find_faulty_rank(self) -> tuple[int, str] | None:
        """Search this machine for a dead or stopped rank, for up to GRACE_S seconds; return the rank and its fault.

        Return None after GRACE_S seconds, or as soon as another rank has created outcome.json.
        """
        own_node = self.processes[self.rank][0] if self.processes else None
        neighbours = [(rank, process) for rank, (node, process) in enumerate(self.processes) if node == own_node]
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and not (self.run_dir / FILE).exists():
            for rank, process in neighbours:
                if (fault := process_fault(process)) is not None:
                    return rank, fault
            time.sleep(0.05)
        return None


@contextmanager
def record_unfinished(failures: Failures) -> Iterator[None]:
    """Write outcome.json if the block raises an exception, and raise the exception again.

    Preempted is recorded by rank 0 only. ExportsFailed is recorded as `finished`, with the reasons. If several ranks
    fail with other exceptions, the first rank that fails records its failure, and the other ranks raise FailedElsewhere
    in place of their own exceptions. A ConfigError or CorruptRank is never replaced. All ranks raise a CorruptRank
    together, and it is recorded with the rank that it names.
    """
    try:
        yield
    except Preempted as end:
        if failures.rank == 0:
            failures.record("preempted", end.reason)
        raise
    except ExportsFailed as end:
        failures.record("finished", failed_exports=end.failed)
        raise
    except CorruptRank as error:  # every rank raises the same error
        failures.log("error", str(error))
        failures.record("failed", str(error), error.rank, corrupt=True)
        raise
    except ConfigError as error:  # every rank raises the same error, so no rank waited for another
        failures.report(f"ConfigError: {error}", waiting=False)
        raise
    except BaseException as error:
        if (elsewhere := failures.record_error(error)) is not None:
            raise elsewhere from None
        raise


def record_exports(run_dir: Path, failed: Mapping[str, str]) -> None:
    """Update outcome.json of a finished run after its failed exports were repeated.

    `failed` maps each phase whose export failed again to the reason.
    """
    path = run_dir / FILE
    outcome = read_record(path) or {"outcome": "finished"}
    if failed or "failed_exports" in outcome:
        outcome.pop("failed_exports", None)
        write_whole(path, json.dumps(outcome | ({"failed_exports": dict(failed)} if failed else {})))


def finite(value: Any) -> Any:
    """Return a value with NaN and infinite floats replaced by None, since JSON can't represent them.

    Floats in mappings are replaced too, at any depth, but floats in lists are not.
    """
    if isinstance(value, Mapping):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def clock(seconds: float) -> str:
    """Format a duration as `1:02:03`, or as `2 days, 1:02:03` from one day on."""
    return str(timedelta(seconds=round(seconds)))


GONE = "is gone: it was killed or crashed"  # a process's fault


def process_fault(process: int) -> str | None:
    """Return a description such as `is stopped (SIGSTOP)` if a process on this machine is dead or stopped, else None.

    On a system without /proc the state of processes is unknown, and the result is always None.
    """
    if not PROC.is_dir():
        return None
    try:
        state = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return GONE
    return {"Z": GONE, "T": "is stopped (SIGSTOP)"}.get(state)


def waits_for_others(frames: Iterable[FrameType]) -> bool:
    """Return True if one of a stack's four innermost calls is in torch.distributed or megatron-core.

    Such a call usually waits for other ranks. `frames` begins with the innermost call.
    """
    innermost = [frame.f_code.co_filename for _, frame in zip(range(4), frames, strict=False)]
    return any(part in name for name in innermost for part in WAITING)
