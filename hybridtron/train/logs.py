"""The log of a run, by the standard module: the logger "hybridtron", to the console and to logs/log-RANK.txt.

The console shows messages alone, warnings and errors on stderr; the file has time, rank, level and module before each.
Nothing is installed at import: `train.run` opens a log and closes it, so that a program that imports this package keeps
its own handlers, and may train several times.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

NAME = "hybridtron"


class ConsoleHandler(logging.Handler):
    """The streams are looked up at each message: a progress bar may have replaced them."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        try:
            print(self.format(record), file=stream, flush=True)
        except Exception:
            self.handleError(record)


class RunLog:
    """A context in which what this rank logs is shown, and written to a file from `write_to` on."""

    def __init__(self, rank: int) -> None:
        self.rank, self.logger = rank, logging.getLogger(NAME)
        self.handlers: list[logging.Handler] = []

    def __enter__(self) -> Self:
        self.level = self.logger.level
        self.logger.setLevel(logging.INFO)
        self._add(ConsoleHandler())
        return self

    def write_to(self, run_dir: Path) -> None:
        """From here on also into the run's folder, which is this run's by now."""
        file = logging.FileHandler(run_dir / "logs" / f"log-{self.rank}.txt", delay=True)
        file.setFormatter(logging.Formatter(f"%(asctime)s rank {self.rank} %(levelname)s %(name)s: %(message)s"))
        self._add(file)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for handler in self.handlers:
            self.logger.removeHandler(handler)
            handler.close()
        self.logger.setLevel(self.level)

    def _add(self, handler: logging.Handler) -> None:
        self.handlers.append(handler)
        self.logger.addHandler(handler)
