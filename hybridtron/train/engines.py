"""The engine of the phase under way, and the next one where a phase needs another.

A phase that uses the model in another way, in another precision, or trains other weights, is begun as a resumed run is:
a new engine is built and reads the checkpoint of the border, in which adapters that end there are merged. So what a run
does at a border, and what a restart there does, is the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.merged import merged
from hybridtron.checkpoint.restore import Border
from hybridtron.config.choices import Moments
from hybridtron.config.resolve import ResolvedPhase, phase_continuing_at, resolve
from hybridtron.config.schema import Config
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.train.start import weights_for


class Engines:
    """Holds one engine at a time, as the memory has room for no more."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self.config, self.groups = config, groups
        self._now: Engine | None = None

    @property
    def now(self) -> Engine:
        assert self._now is not None
        return self._now

    def build(self, phase: int, whole: Callable[[str], Tensor] | None = None) -> Engine:
        """An engine for a phase, in the place of the one before."""
        self._now = None
        gc.collect()  # modules and hooks refer to each other
        self._now = Engine(self.config, self.groups, whole, phase=phase)
        if self.config.run.compile:
            self._now.compile()
        return self._now

    def engine_for(self, checkpoint: Checkpoint) -> tuple[Engine, Border | None]:
        """The engine that continues from a checkpoint; where a phase begins there, also from which weights."""
        phase = phase_continuing_at(resolve(self.config), checkpoint.meta.step)
        begins = phase.index > 0 and checkpoint.meta.step == phase.start_step
        if self._now is None or not self._now.serves(phase.index) or (begins and not phase.keeps_adapters):
            self.build(phase.index)
        if not begins:
            return self.now, None
        given = weights_for(phase)
        if given is not None:
            return self.now, Border(given, moments=False, key=phase.own_key("init_from"))
        if not phase.keeps_adapters:  # what was learned before does not learn now, or stands beside what is new
            return self.now, Border(merged(checkpoint), moments=False)
        return self.now, Border(checkpoint, phase.settings.moments is Moments.keep)

    def needs_rebuild(self, phase: ResolvedPhase) -> bool:
        """Whether a phase begins with anything but what the one before leaves."""
        replaced = phase.settings.init_from is not None or phase.settings.moments is Moments.reset
        return replaced or not phase.keeps_adapters or not self.now.serves(phase.index)
