"""Builds the engine of the current phase: the model with its optimizer.

A phase may change the model's options, the precision, the optimizer or the set of trained weights. Such a phase begins
as if the run were resumed: a new engine is built, and the checkpoint from the end of the phase before is restored into
the engine. If the phase has other adapters than that checkpoint, the checkpoint's adapters are merged into the weights.
If the phase has another optimizer, the optimizer's state is zero. So it makes no difference whether a run trains across
the phase boundary, or is stopped there and started again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.merged import merge_adapters
from hybridtron.checkpoint.restore import PhaseBoundary
from hybridtron.config.choices import Moments
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.train.start import weights_for


class PhaseEngines:
    """Builds the engines for a run's phases, and holds only one engine at a time to save memory."""

    def __init__(self, plan: RunPlan, groups: Groups) -> None:
        self.plan = plan
        self.groups = groups
        self._current: Engine | None = None

    @property
    def current(self) -> Engine:
        """The current engine; `build` or `engine_for` must have been called."""
        assert self._current is not None
        return self._current

    def build(self, phase: ResolvedPhase, whole: Callable[[str], Tensor] | None = None) -> Engine:
        """Build a phase's engine, after freeing the current engine.

        `whole` takes a weight's name and returns the full initial weight. If `whole` is None, weights are initialized
        at random.
        """
        self._current = None
        gc.collect()  # modules and their hooks form reference cycles
        self._current = Engine(phase, self.groups, whole)
        if self.plan.config.run.compile:
            self._current.compile()
        if self.plan.config.run.cuda_graph:
            self._current.use_graphs()
        return self._current

    def engine_for(self, checkpoint: Checkpoint) -> tuple[Engine, PhaseBoundary | None]:
        """Return the engine that continues from a checkpoint, and the phase boundary at the checkpoint's step.

        A new engine is built if the current engine does not fit the phase that continues from the checkpoint. If a
        phase other than the first begins at the checkpoint's step, the boundary holds the checkpoint with the phase's
        initial weights, and says whether the optimizer's moments are kept. Otherwise the boundary is None.
        """
        phase = self.plan.phase_continuing_at(checkpoint.meta.step)
        begins = phase.index > 0 and checkpoint.meta.step == phase.start_step
        if self._current is None or not self._current.supports(phase) or (begins and not phase.keeps_adapters):
            self.build(phase)
        if not begins:
            return self.current, None
        initial = weights_for(phase)
        if initial is not None:
            return self.current, PhaseBoundary(initial, moments=False, key=phase.own_key("init_from"))
        if not phase.keeps_adapters:  # the adapters change here, so the moments do not fit the weights
            return self.current, PhaseBoundary(merge_adapters(checkpoint), moments=False)
        return self.current, PhaseBoundary(checkpoint, phase.settings.moments is Moments.keep and phase.keeps_optimizer)

    def needs_rebuild(self, phase: ResolvedPhase) -> bool:
        """Return True if a phase can't continue with the weights and moments in the current engine."""
        replaced = phase.settings.init_from is not None or phase.settings.moments is Moments.reset
        return replaced or not phase.keeps_adapters or not self.current.supports(phase)
