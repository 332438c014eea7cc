"""Identity of a run's local checkpoints, and which of them are usable: the file `RUN/checkpoints/local`.

    6f1c0a52b7d94e38    text in the names of the run's local folders
    120                 last usable step of all local checkpoints that were written before this line

A rollback, or silent corruption, adds a line. Local checkpoints of later steps are also removed, but a node that is
absent at that time, or whose disk fails, may come back with them.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hybridtron.problems import ConfigError, Problem
from hybridtron.safe_open import read_regular
from hybridtron.storage.durable import put

FILE = "local"
FILE_BYTES = 2**16  # largest file that is read
TEXT = re.compile(r"[0-9a-f]{16}")  # another text could name a folder elsewhere
STEP = re.compile(r"\d{1,15}")


@dataclass(frozen=True)
class Identity:
    """Content of the file.

    text: part of the names of the run's local folders
    limits: for each limit, the last usable step of the local checkpoints that were written before the limit was added
    """

    text: str
    limits: tuple[int, ...] = ()

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Build an identity from the plain values that the method `values` returns."""
        return cls(values["text"], tuple(values["limits"]))

    def values(self) -> dict[str, Any]:
        """Return the identity as plain values, which ranks can exchange."""
        return {"text": self.text, "limits": list(self.limits)}

    def limit_of(self, step: int, limits: int) -> int | None:
        """Return the limit because of which a local checkpoint is not usable; None if it is usable.

        limits: how many limits there were when the checkpoint was written
        """
        lowest = min(self.limits[limits:], default=step)
        return lowest if lowest < step else None


def stored_identity(run_dir: Path) -> Identity | None:
    """Return the identity of a run's local checkpoints, or None if the run has none. Raises ConfigError."""
    path = run_dir / "checkpoints" / FILE
    try:
        text, *limits = read_regular(path, FILE_BYTES).decode("ascii", "replace").splitlines() or [""]
        if TEXT.fullmatch(text) is None:
            raise ValueError(f"line 1 is {text!r}, and not 16 hex digits")
        return Identity(text, tuple(_limit(line, number) for number, line in enumerate(limits, 2)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = f"can't be read: {error}; delete it, and the run's local checkpoints are not used"
        raise ConfigError([Problem(str(path), "unreadable", why)]) from error


def _limit(line: str, number: int) -> int:
    """Return the step in a line of the file. Raises ValueError for another text."""
    if STEP.fullmatch(line) is None:
        raise ValueError(f"line {number} is {line!r}, and not a step")
    return int(line)


def identity_for(run_dir: Path) -> Identity:
    """Return the identity of the run's local checkpoints. If the run has none, create and store it."""
    identity = stored_identity(run_dir)
    if identity is None:
        identity = Identity(secrets.token_hex(8))
        _store(run_dir, identity)
    return identity


def renew_identity(run_dir: Path) -> None:
    """Let no later start find the local checkpoints that the run has now."""
    if (run_dir / "checkpoints" / FILE).exists():
        _store(run_dir, Identity(secrets.token_hex(8)))


def with_limit(run_dir: Path, identity: Identity, step: int) -> Identity:
    """Add a limit: local checkpoints that exist now are not usable if their step is after `step`."""
    limited = Identity(identity.text, (*identity.limits, step))
    _store(run_dir, limited)
    return limited


def limit_stored(run_dir: Path, step: int) -> None:
    """Add a limit if the run has an identity: earlier starts may have written local checkpoints."""
    with suppress(ConfigError):  # no start uses local checkpoints while the file is damaged
        identity = stored_identity(run_dir)
        if identity is not None:
            with_limit(run_dir, identity, step)


def _store(run_dir: Path, identity: Identity) -> None:
    lines = [identity.text, *map(str, identity.limits)]
    put(run_dir / "checkpoints" / FILE, "".join(f"{line}\n" for line in lines).encode())
