"""The engine of the current phase, rebuilt where a phase needs another one.

A phase may change the model's options, the precision or the set of trained weights. Such a phase begins as a resumed
run does: a new engine is built and reads the checkpoint at the phase boundary, with adapters that end there merged into
their weights. So a run that crosses a boundary computes the same as one that restarts there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.merged import merged
from hybridtron.checkpoint.restore import Border
from hybridtron.config.choices import Moments
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.train.start import weights_for


class Engines:
    """Builds the engines of a run's phases and holds one at a time, since memory has no room for two."""

    def __init__(self, plan: RunPlan, groups: Groups) -> None:
        self.plan = plan
        self.groups = groups
        self._now: Engine | None = None

    @property
    def now(self) -> Engine:
        """The current engine; `build` or `engine_for` must have been called."""
        assert self._now is not None
        return self._now

    def build(self, phase: int, whole: Callable[[str], Tensor] | None = None) -> Engine:
        """Build the engine of a phase, after dropping the current one.

        `whole` returns a full weight by name, to start from; without it weights are initialized.
        """
        self._now = None
        gc.collect()  # modules and hooks refer to each other
        self._now = Engine(self.plan.config, self.groups, whole, phase=phase)
        if self.plan.config.run.compile:
            self._now.compile()
        return self._now

    def engine_for(self, checkpoint: Checkpoint) -> tuple[Engine, Border | None]:
        """Return the engine that continues from a checkpoint, built if the current one does not fit.

        If a phase other than the first begins at the checkpoint's step, the second value says which weights the phase
        starts from, and whether it keeps the moments. Otherwise it is None.
        """
        phase = self.plan.phase_continuing_at(checkpoint.meta.step)
        begins = phase.index > 0 and checkpoint.meta.step == phase.start_step
        if self._now is None or not self._now.serves(phase.index) or (begins and not phase.keeps_adapters):
            self.build(phase.index)
        if not begins:
            return self.now, None
        initial = weights_for(phase)
        if initial is not None:
            return self.now, Border(initial, moments=False, key=phase.own_key("init_from"))
        if not phase.keeps_adapters:  # adapters end or begin here, so the trained weights are others
            return self.now, Border(merged(checkpoint), moments=False)
        return self.now, Border(checkpoint, phase.settings.moments is Moments.keep)

    def needs_rebuild(self, phase: ResolvedPhase) -> bool:
        """Return True if a phase can't continue with the current engine, weights and moments as they are."""
        replaced = phase.settings.init_from is not None or phase.settings.moments is Moments.reset
        return replaced or not phase.keeps_adapters or not self.now.serves(phase.index)
