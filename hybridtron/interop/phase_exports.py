"""Exports checkpoints during a run: at the end of each phase with the key `phases.N.export`.

A failed export does not end training. It is logged, and retried when the next phase ends, at the end of the run, and
when the run is started again. If a process was killed during an export, the process may have run out of memory. Then
the export is retried only after the last training step.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from pathlib import Path

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.merged import merge_adapters
from hybridtron.config.checks.export import exported_step
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.interop.consumers import summary_of
from hybridtron.storage.durable import temporary_of
from hybridtron.train.hooks import Hook, RunContext, StepContext
from hybridtron.train.outcome import Failures

SHARD_BYTES = 5 * 10**9
LOG = logging.getLogger(__name__)


class PhaseExports(Hook):
    """Hook that exports phases on rank 0, while all other ranks wait.

    The watchdog ends the run if an export takes longer than `run.timeout`.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.run_dir = plan.run_dir
        self.last_step = plan.last_step
        self.wanted = {phase.settings.name: phase for phase in plan.phases if phase.settings.export is not None}
        self._failed: dict[str, str] = {}

    @property
    def failed(self) -> Mapping[str, str]:
        """Phase name -> reason why the last attempt to export the phase failed."""
        return self._failed

    def on_run_start(self, run: RunContext) -> None:
        self._export_ended(run, run.resumed_step)

    def on_phase_end(self, context: StepContext) -> None:
        if context.step < self.last_step:
            self._export_ended(context.run, context.step)

    def on_run_end(self, run: RunContext) -> None:
        self._export_ended(run, self.last_step)

    def retry_failed(self, run: RunContext) -> None:
        self._export_ended(run, run.resumed_step)

    def _export_ended(self, run: RunContext, step: int) -> None:
        """Export every phase that has ended by this step, if it has no export yet."""
        for name, phase in self.wanted.items():
            if phase.end_step > step:
                continue
            run.beat(f"the work after phase {name}")
            if run.groups.is_first:
                self._export(name, phase, step)
            run.groups.control.barrier()

    def _export(self, name: str, phase: ResolvedPhase, step: int) -> None:
        """Export a phase unless its last step is exported already. Failures are logged, not raised."""
        output = self.run_dir / "export" / name
        if exported_step(output) == phase.end_step:
            return
        if temporary_of(output).exists() and step < self.last_step:
            self._failed[name] = "a process was killed during this export, which is retried at the end of the run"
            return
        try:
            source = merge_adapters(Checkpoint.open(checkpoints.folder_of(self.run_dir, phase.end_step)))
            export_phase(source, output, phase)
        except Exception as error:
            self._report(name, error)
        else:
            self._failed.pop(name, None)
            LOG.info("%s is exported: %s", name, output)

    def _report(self, name: str, error: Exception) -> None:
        self._failed[name] = f"{type(error).__name__}: {error}"
        Failures(self.run_dir, 0).log("export", "".join(traceback.format_exception(error)))
        note = "training continues, and the export is retried later; logs/export-0.txt has the traceback"
        LOG.error("ERROR: the export of %s failed: %s\n%s", name, self._failed[name], note)


def export_phase(source: Checkpoint, output: Path, phase: ResolvedPhase) -> None:
    """Export a phase's checkpoint, and verify the export: sampled layers must compute the same as in the checkpoint.

    The sample has the first and the last layer of every kind. Raises FileExistsError if `output` exists.
    """
    from hybridtron.interop.export import ExportPlan, export, target_of  # deferred, because it imports transformers
    from hybridtron.interop.sample import verify_sample

    if output.exists():
        raise FileExistsError(f"{output} exists, but is not an export of this phase: rename it")
    assert phase.settings.export is not None
    target = target_of(source.plan.arch, phase.settings.export)

    def prove(folder: Path) -> None:
        verify_sample(folder, source, target)

    for warning in export(output, ExportPlan(source, target, None, SHARD_BYTES), prove, lambda done, of: None):
        LOG.warning("warning: %s: %s", output, warning)
    LOG.info("%s: %s", output, summary_of(output))
