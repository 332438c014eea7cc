"""Logging of a run: the logger "hybridtron" writes to the console and to logs/log-RANK.txt.

The console shows messages without time or level; warnings and errors go to stderr. The file adds time, rank, level and
module to each message.

Importing hybridtron adds no handler to the logger. `train.run_training` adds handlers when it begins, and removes them
when it ends. So a program that imports hybridtron keeps its own handlers, and may train several times.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

NAME = "hybridtron"


class ConsoleHandler(logging.Handler):
    """Handler that reads sys.stdout and sys.stderr at each message, since a progress bar may have replaced them."""

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
    """Context manager that shows this rank's messages on the console. `write_to` adds a file for the messages."""

    def __init__(self, rank: int) -> None:
        self.rank, self.logger = rank, logging.getLogger(NAME)
        self.handlers: list[logging.Handler] = []

    def __enter__(self) -> Self:
        self.level = self.logger.level
        self.logger.setLevel(logging.INFO)
        self._add(ConsoleHandler())
        return self

    def write_to(self, run_dir: Path) -> None:
        """From now on, write messages also to a file in the run's folder, which this run must have locked."""
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
