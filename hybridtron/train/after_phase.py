"""Two protocols by which a caller adds work to the training loop.

`AfterPhase` runs once a phase has ended and its checkpoint is written, for example to export it. `Evaluation` measures
the model between steps, as `run.evaluate` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hybridtron.config.resolve import ResolvedPhase
from hybridtron.data.sources import Sources
from hybridtron.engine.engine import Engine


class AfterPhase(Protocol):
    """Work that the first process does after a phase, while the others wait.

    It must not raise. It records failures in `failed` instead, as reasons by name. Any entry makes the run exit with
    code 1.
    """

    @property
    def failed(self) -> Mapping[str, str]:
        """Reasons of the failures so far, by name, such as a phase's."""
        ...

    def due(self, step: int, /) -> Sequence[str]:
        """Return the names of the phases that may have work after this step; the same on all processes."""
        ...

    def run(self, name: str, step: int, /) -> None:
        """Do the work of a phase that is due, if it is not done. Only the first process calls it."""
        ...


class Evaluation(Protocol):
    """A measurement of the model during training. All processes call it together.

    It must leave the random state of training unchanged.
    """

    def begin(self, phase: ResolvedPhase, sources: Sources, /) -> list[str]:
        """Prepare to measure in a phase.

        Returns one line for each measurement that is not possible, with the reason. Raises ConfigError for a mistake
        that the user must mend.
        """
        ...

    def measure(self, engine: Engine, step: int, beat: Callable[[str], None], /) -> dict[str, float]:
        """Return metrics of the model by name. It calls `beat` with each part that it begins, for the watchdog."""
        ...
