"""Work where a phase has ended and its checkpoint is written, such as an export, which a run is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


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
