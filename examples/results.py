"""What a study keeps of every run that it has measured: a small JSON file each, from which pages are written.

With `--results DIR` these files stand in DIR, and a study continues on another machine: a run whose file is there is
neither trained nor measured again. Without it they stand beside the run's checkpoints.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hybridtron.problems import Unusable
from hybridtron.proving.measuring import processor, versions
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import Sweep, SweepRun
from hybridtron.train.records import read_lines, read_record, write_whole

ROOT = Path(__file__).resolve().parents[1]
BESIDE = "measured.json"


@dataclass(frozen=True)
class Part:
    """A sweep of a study, the folder of its runs, and what is measured on each of them.

    `asked` is what decides, beside a run's settings, what is found: sizes of the data and of the measurement.
    """

    sweep: Sweep
    folder: Folder
    measure: Callable[[SweepRun, Path], Any]
    asked: Mapping[str, Any]

    def identity(self, run: SweepRun) -> dict[str, Any]:
        """What a result must agree with, on every machine."""
        start = next((one for one in self.sweep.runs if one.name == run.start), None)
        return {
            "settings": portable(run),
            "start": None if start is None else portable(start),
            "asked": json.loads(json.dumps(self.asked)),
        }


@dataclass(frozen=True)
class TrainedPhase:
    """A phase, as pages describe it."""

    name: str
    tokens: str
    seq_len: int
    global_batch: int
    lr: float | None


@dataclass(frozen=True)
class Trained:
    """What was trained, as pages describe it."""

    parameters: int
    pattern: str
    width: int
    layers: dict[str, dict[str, Any]]
    source: str
    seed: int
    steps: int
    phases: list[TrainedPhase]

    @classmethod
    def of(cls, run: Path) -> Trained:
        from hybridtron.config.load import load_saved
        from hybridtron.config.resolve import last_step
        from hybridtron.planning.count import count

        config = load_saved(run / "config.yaml")
        model = config.model
        phases = [TrainedPhase(p.name, str(p.tokens), p.seq_len, p.global_batch, p.lr) for p in config.phases]
        return cls(
            parameters=count(model, phases[0].seq_len).parameters,
            pattern=model.pattern,
            width=model.width,
            layers={letter: dict(options) for letter, options in model.layers.items()},
            source=config.data.source,
            seed=config.run.seed,
            steps=last_step(config),
            phases=phases,
        )

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Trained:
        phases = [TrainedPhase(**phase) for phase in record["phases"]]
        fields: dict[str, Any] = {**record, "phases": phases}
        return cls(**fields)


@dataclass(frozen=True)
class Result:
    """Of one run: what was trained, what was found on it, and by which code. `minutes` are those of its steps."""

    trained: Trained
    found: Any
    minutes: float
    commit: str


@dataclass(frozen=True)
class Results:
    """Where the results of a study are: in a folder of their own, or beside each run."""

    kept: Path | None

    def path(self, name: str, part: Part, run: SweepRun) -> Path:
        return part.folder.of(run.name) / BESIDE if self.kept is None else self.kept / f"{name}-{run.name}.json"

    def of(self, name: str, part: Part, run: SweepRun) -> Result | None:
        """None where the run has not been measured. Unusable where a kept file is that of another run."""
        path = self.path(name, part, run)
        record = read_record(path)
        changed = [key for key, value in part.identity(run).items() if record.get(key) != value]
        if record and not changed:
            return Result(Trained.read(record["trained"]), record["found"], record["minutes"], record["commit"])
        if record and self.kept is not None:
            cure = "remove it, or name another folder with --results"
            raise Unusable(f"{path} has other {' and '.join(changed)}: {cure}")
        return None

    def measure(self, name: str, part: Part, run: SweepRun) -> None:
        """Of a run that has finished: written at once."""
        trained = part.folder.of(run.name)
        path = self.path(name, part, run)
        minutes = sum(line["step_time"] for line in read_lines(trained / "metrics.jsonl")) / 60
        record = {
            **part.identity(run),
            "trained": asdict(Trained.of(trained)),
            "found": part.measure(run, trained),
            "minutes": round(minutes, 2),
            "commit": commit(),
            "versions": versions(),
            "machine": processor(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
        write_whole(path, f"{{\n{lines}\n}}\n")


def portable(run: SweepRun) -> list[str]:
    """Its settings, with a folder of data by its name alone: where it stands differs from machine to machine."""
    pairs = (text.partition("=") for text in run.settings)
    return [f"{key}={Path(value).name if key.endswith('.path') else value}" for key, _, value in pairs]


@cache
def commit() -> str:
    """That of this code, marked where it was changed since."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
