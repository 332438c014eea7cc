"""Log of faults in RUN/logs/restarts.jsonl: their causes, the restarts that followed, and the time that was lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hybridtron.train.jsonl import read_lines

FILE = "restarts.jsonl"
CORRUPT = "corrupt"  # cause of a fault: the bits of a rank's state, weights or gradients are wrong


@dataclass
class RankFault:
    """A line of logs/restarts.jsonl: one fault, and the restart that followed.

    time: the time at which the fault was found, in seconds since 1970
    cause: `killed`, `failed`, `corrupt`, `lost node`, or `hung in` with the section
    rank, host: the rank at fault, and its host; the rank is -1 if no single rank is at fault
    detail: what was observed
    section, doing: the kind of the rank's work, and its description
    limit_s: the section's time limit in seconds
    step: the last step that was trained
    resumed: the step of the checkpoint from which training continued; None without a restart
    found_s: seconds from the fault until it was found
    restart_s: seconds from then until the end of the first step after the restart
    repeated_s: seconds of the steps that are trained again after the checkpoint
    spare: the host that took over; empty if the rank's own host continued
    """

    time: float
    cause: str
    rank: int
    host: str
    detail: str
    section: str
    doing: str
    limit_s: float
    step: int
    found_s: float
    resumed: int | None = None
    restart_s: float = 0.0
    repeated_s: float = 0.0
    spare: str = ""

    @property
    def lost_s(self) -> float:
        return self.found_s + self.restart_s + self.repeated_s

    def words(self) -> str:
        """Describe the fault, such as `rank 1 on n2: hung in step (step 12): is stopped (SIGSTOP)`."""
        who = f"rank {self.rank} on {self.host}" if self.rank >= 0 else "no single rank"
        return f"{who}: {self.cause} ({self.doing}): {self.detail}"


def record(run_dir: Path, fault: RankFault) -> None:
    """Append a fault to the run's log."""
    path = run_dir / "logs" / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(fault)) + "\n")


def read(run_dir: Path) -> list[RankFault]:
    """Return the faults of a run, the oldest first."""
    names = {field.name for field in fields(RankFault)}
    return [RankFault(**line) for line in read_lines(run_dir / "logs" / FILE) if line.keys() == names]


def words(faults: Sequence[RankFault]) -> str:
    """Return the time lost by cause, such as `12.0 s killed (found 0.0, restarted 8.0, repeated 4.0; 1 fault)`."""
    lost: dict[str, list[RankFault]] = {}
    for fault in faults:
        lost.setdefault(fault.cause, []).append(fault)
    ordered = sorted(lost.items(), key=lambda item: -sum(fault.lost_s for fault in item[1]))
    return ", ".join(_words(cause, of_cause) for cause, of_cause in ordered)


def _words(cause: str, faults: Sequence[RankFault]) -> str:
    found_s = sum(fault.found_s for fault in faults)
    restart_s = sum(fault.restart_s for fault in faults)
    repeated_s = sum(fault.repeated_s for fault in faults)
    parts = f"found {found_s:.1f}, restarted {restart_s:.1f}, repeated {repeated_s:.1f}"
    count = f"{len(faults)} fault{'s' * (len(faults) > 1)}"
    return f"{found_s + restart_s + repeated_s:.1f} s {cause} ({parts}; {count})"
