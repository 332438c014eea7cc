"""Logging of a run: the logger "hybridtron" writes to the console and to logs/log-RANK.txt.

The console shows bare messages, with warnings and errors on stderr. The file adds time, rank, level and module to each.
No handler is installed at import. `train.run` adds handlers and removes them at its end, so that a program that imports
this package keeps its own, and may train several times.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

NAME = "hybridtron"


class ConsoleHandler(logging.Handler):
    """Handler that looks up stdout and stderr at each message, since a progress bar may have replaced them."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            stream = sys.stderr
        else:
            stream = sys.stdout
        try:
            print(self.format(record), file=stream, flush=True)
        except Exception:
            self.handleError(record)


class RunLog:
    """Context manager that shows this rank's log on the console, and after `write_to` also writes it to a file."""

    def __init__(self, rank: int) -> None:
        self.rank, self.logger = rank, logging.getLogger(NAME)
        self.handlers: list[logging.Handler] = []

    def __enter__(self) -> Self:
        self.level = self.logger.level
        self.logger.setLevel(logging.INFO)
        self._add(ConsoleHandler())
        return self

    def write_to(self, run_dir: Path) -> None:
        """Also write messages to the run's folder from now on. The run must hold the folder's lock."""
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
