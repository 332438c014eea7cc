"""The stored results of a study: a small JSON file for each measured run, from which pages are written.

With `--results DIR` the files are kept in DIR, and a study can continue on another machine: a run with a result there
is neither trained nor measured again. Without it they are kept next to the run's checkpoints.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import RunPlan
from hybridtron.problems import Unusable
from hybridtron.proving.measuring import processor, versions
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import Sweep, SweepRun
from hybridtron.train.jsonl import read_lines, read_record, write_whole

ROOT = Path(__file__).resolve().parents[1]
BESIDE = "measured.json"


@dataclass(frozen=True)
class Part:
    """A sweep in a study, the folder for its runs, and the function that measures a run.

    `asked` holds the sizes of data and measurement. Together with a run's settings it determines the result.
    """

    sweep: Sweep
    folder: Folder
    measure: Callable[[SweepRun, Path], Any]
    asked: Mapping[str, Any]

    def identity(self, run: SweepRun) -> dict[str, Any]:
        """Return the record by which a stored result is recognised, on every machine, as this run's."""
        starts = [portable(other) for other in self.sweep.runs if other.name == run.start]
        return {
            "settings": portable(run),
            "start": next(iter(starts), None),
            "asked": json.loads(json.dumps(self.asked)),
        }


@dataclass(frozen=True)
class TrainedPhase:
    """The description of a phase that pages print."""

    name: str
    tokens: str
    seq_len: int
    global_batch: int
    lr: float | None


@dataclass(frozen=True)
class Trained:
    """The description of a trained model that pages print."""

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
        from hybridtron.planning.count import count

        config = load_saved(run / "config.yaml")
        model = config.model
        phases = [TrainedPhase(p.name, str(p.tokens), p.seq_len, p.global_batch, p.lr) for p in config.phases]
        return cls(
            parameters=count(architecture(model), phases[0].seq_len).parameters,
            pattern=model.pattern,
            width=model.width,
            layers={letter: dict(options) for letter, options in model.layers.items()},
            source=config.data.source,
            seed=config.run.seed,
            steps=RunPlan.of(config).last_step,
            phases=phases,
        )

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Trained:
        phases = [TrainedPhase(**phase) for phase in record["phases"]]
        fields: dict[str, Any] = {**record, "phases": phases}
        return cls(**fields)


@dataclass(frozen=True)
class Result:
    """A run's stored result: its description, the measured values, and the code's commit.

    `minutes` is the summed time of its steps.
    """

    trained: Trained
    measured: Any
    minutes: float
    commit: str


@dataclass(frozen=True)
class Results:
    """The place of a study's results: the folder `kept`, or next to each run if that is None."""

    kept: Path | None

    def path(self, name: str, part: Part, run: SweepRun) -> Path:
        if self.kept is None:
            return part.folder.of(run.name) / BESIDE
        return self.kept / f"{name}-{run.name}.json"

    def of(self, name: str, part: Part, run: SweepRun) -> Result | None:
        """Read a run's result; None if it has not been measured.

        Raises Unusable if a file in the results folder belongs to other settings.
        """
        path = self.path(name, part, run)
        record = read_record(path)
        changed = [key for key, value in part.identity(run).items() if record.get(key) != value]
        if record and not changed:
            return Result(Trained.read(record["trained"]), record["found"], record["minutes"], record["commit"])
        if record and self.kept is not None:
            cure = "remove it, or name another folder with --results"
            raise Unusable(f"{path} has other {' and '.join(changed)}: {cure}", code="changed")
        return None

    def measure(self, name: str, part: Part, run: SweepRun) -> None:
        """Measure a finished run and write its result."""
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
    """Return a run's settings with data paths reduced to the folder's name.

    The place of that folder differs from machine to machine.
    """
    pairs = (text.partition("=") for text in run.settings)
    return [f"{key}={Path(value).name if key.endswith('.path') else value}" for key, _, value in pairs]


def results_of(study: str) -> Path:
    """Return the folder in which a study's results are committed."""
    return ROOT / "studies" / study / "results"


@cache
def commit() -> str:
    """Return the commit of this code, marked if files were changed since; `unknown` outside a repository."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
