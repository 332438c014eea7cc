"""The ends of phases as folders for transformers, written while a run goes through its phases.

An export that fails is reported and retried later: where the next phase ends, at the end of the run, and at the next
start. It never ends training. One whose process was killed (it may need more memory than there is) is retried only when
nothing is left to train.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.files import temporary_path
from hybridtron.config.checks.export import exported_step
from hybridtron.config.choices import Export
from hybridtron.config.resolve import ResolvedPhase, last_step, resolve
from hybridtron.config.schema import Config
from hybridtron.train.failures import Failures

ExportPhase = Callable[[Checkpoint, Path, Export], None]
"""Writes the end of a phase as a folder for transformers."""


class PhaseExports:
    """Those that a run's phases ask for; `failed` says of each that failed last why it did, by the phase's name."""

    def __init__(self, config: Config, export: ExportPhase) -> None:
        self.config, self.export = config, export
        self.run_dir = Path(config.run.dir)
        self.failed: dict[str, str] = {}

    def ended(self, step: int) -> list[ResolvedPhase]:
        """Phases with an export that have ended at a step."""
        return [one for one in resolve(self.config) if one.settings.export is not None and one.end_step <= step]

    def write(self, step: int) -> None:
        """Export what has ended at a step and is not there yet."""
        for phase in self.ended(step):
            name = phase.settings.name
            output = self.run_dir / "export" / name
            if exported_step(output) == phase.end_step:
                continue
            if temporary_path(output).exists() and step < last_step(self.config):
                self.failed[name] = "it was killed once, and is tried again at the end of the run"
                continue
            try:
                self._write(phase, output)
            except Exception as error:
                self._report(name, error)
            else:
                self.failed.pop(name, None)
                print(f"{name} is exported: {output}")

    def _write(self, phase: ResolvedPhase, output: Path) -> None:
        if output.exists():
            raise FileExistsError(f"{output} is something else: move it away")
        assert phase.settings.export is not None
        self.export(Checkpoint.open(checkpoints.folder_of(self.run_dir, phase.end_step)), output, phase.settings.export)

    def _report(self, name: str, error: Exception) -> None:
        self.failed[name] = f"{type(error).__name__}: {error}"
        Failures(self.run_dir, 0).log("export", "".join(traceback.format_exception(error)))
        again = "training goes on, and the export is tried again later; logs/export-0.txt has the traceback"
        print(f"ERROR: the export of {name} failed: {self.failed[name]}\n{again}", file=sys.stderr)
