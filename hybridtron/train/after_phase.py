"""Work that a run is given: where a phase has ended and its checkpoint is written, and `run.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from hybridtron.config.resolve import ResolvedPhase
from hybridtron.data.sources import Sources
from hybridtron.engine.engine import Engine


class AfterPhase(Protocol):
    """Done by the first process while the others wait.

    It must not raise: what went wrong stays in `failed`, by a name, and makes the run's exit code 1 at its end.
    """

    @property
    def failed(self) -> Mapping[str, str]: ...

    def due(self, step: int, /) -> bool:
        """Whether there may be something to do after this step; the same on every process."""
        ...

    def run(self, step: int, /) -> None: ...


class Evaluation(Protocol):
    """Measures the model while it trains; all processes call it together. It draws no number that training draws."""

    def begin(self, phase: ResolvedPhase, sources: Sources, /) -> list[str]:
        """What can't be measured in a phase, with the reason; ConfigError where a user must know."""
        ...

    def measure(self, engine: Engine, step: int, beat: Callable[[str], None], /) -> dict[str, float]: ...
