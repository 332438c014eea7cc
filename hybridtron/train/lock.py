"""Lock on a run's folder, so that one run has one writer.

The run's first process holds RUN/.lock from before it looks into the folder until it ends. The lock is the kernel's
(flock), which releases it however the process dies. The file names the holder, and its time stamp is renewed every
BEAT_S as a heartbeat. The heartbeat decides where the file system has no locks, and where the holder runs on another
machine, since some file systems apply locks within one machine only. A holder whose time stamp has not changed for
STALE_S is dead. The time stamp's value is never compared with a clock: the machines' clocks differ, and they jump.

Only a start takes the lock; reading a run needs none.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from hybridtron.problems import ConfigError, Problem
from hybridtron.train.launcher import GRACE_S

FILE = ".lock"
PATIENCE_S = GRACE_S + 10.0  # a start waits until an orphan of a killed launcher has ended
SLURM_PATIENCE_S = 120.0  # batch jobs can wait; NFS keeps a dead node's locks for its lease of 90 s
BEAT_S = 2.0
STALE_S = 20.0
SETTLE_S = 1.0  # after which two processes that replace a dead holder at once see which of them wrote last
LOOK_S = 0.2  # between attempts to take the lock
SIZE = 512  # bytes of the file: constant, so that one write replaces a record
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class RunLock:
    """Context manager that holds the lock of a run's folder. It creates the folder if it is missing.

    Entering raises ConfigError if the folder can't be used, or if another process still holds it when the patience ends
    or when `given_up` returns True.
    """

    def __init__(self, run_dir: Path, given_up: Callable[[], bool] = lambda: False) -> None:
        self.run_dir = run_dir
        self.path = run_dir / FILE
        self.given_up = given_up
        if "SLURM_JOB_ID" in os.environ:
            self.patience_s = SLURM_PATIENCE_S
        else:
            self.patience_s = PATIENCE_S
        self.here = f" on {socket.gethostname()} since "
        self.own = f"process {os.getpid()}{self.here}{datetime.now(UTC).isoformat(' ', 'microseconds')}"
        self._holder = ""
        self._beat_of: tuple[str, int] | None = None  # the holder last seen, and its time stamp
        self._changed = 0.0  # when that time stamp was first seen, on the monotonic clock
        self._released = threading.Event()

    def __enter__(self) -> Self:
        self._made = False
        try:
            self._made = not self.run_dir.exists()
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._wait()
        except ConfigError:
            raise
        except (OSError, ValueError) as error:  # a ValueError for a NUL in the name
            self._remove_empty()
            if isinstance(error, OSError):
                reason = error.strerror
            else:
                reason = error
            raise ConfigError(
                [Problem("run.dir", "unreadable", f"{self.run_dir} can't be used: {reason}; name a folder")]
            ) from error
        threading.Thread(target=self._renew, name="lock", daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._released.set()
        with suppress(OSError):
            if _holder_at(self.path) == self.own:
                self.path.unlink()
        os.close(self._file)
        self._remove_empty()

    def _remove_empty(self) -> None:
        """Remove the folder if this start created it and it is still empty."""
        with suppress(OSError, ValueError):
            if self._made:
                with suppress(FileNotFoundError):
                    (self.run_dir / "logs").rmdir()
                self.run_dir.rmdir()

    def _wait(self) -> None:
        """Take the lock as soon as its holder releases it. Raises ConfigError when the patience ends."""
        until = time.monotonic() + self.patience_s
        reported = False
        while not self._taken():
            holder = self._holder or "another process"
            if time.monotonic() > until or self.given_up():
                cure = "stop it, or name another folder"
                raise ConfigError([Problem("run.dir", "in-use", f"{self.run_dir} is in use by {holder}: {cure}")])
            if not reported:
                waits = f"waiting up to {self.patience_s:.0f} s"
                print(f"{self.run_dir} is in use by {holder}; {waits}", file=sys.stderr, flush=True)
                reported = True
            time.sleep(LOOK_S)

    def _taken(self) -> bool:
        """Try to take the lock once, and return True on success. The file then stays open in `self._file`."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        acquired = False
        try:
            locked = _lock(self._file)
            self._holder = _read(self._file)
            if locked is False or not _is_at(self.path, self._file):  # the latter: its holder has just removed the file
                return False
            by_heartbeat = locked is None or self.here not in self._holder
            if self._holder and by_heartbeat and self._beats():
                return False
            self._write_own()
            acquired = locked is not None or self._settled()
            return acquired
        finally:
            if not acquired:
                os.close(self._file)

    def _write_own(self) -> None:
        try:
            os.pwrite(self._file, f"{self.own:<{SIZE - 1}}\n".encode(), 0)
            os.fsync(self._file)
        except OSError:  # a full disk
            self.path.unlink()
            raise

    def _settled(self) -> bool:
        """Return True if this process was the last to write its record, where the file system has no locks.

        Several processes may replace a dead holder at once; after SETTLE_S all see the same winner.
        """
        time.sleep(SETTLE_S)
        self._holder = _holder_at(self.path)
        if self._holder != self.own:
            return False
        instead = f"a heartbeat in {self.path} takes their place, and a start after a crash waits {STALE_S:.0f} s"
        print(f"warning: the file system of {self.run_dir} has no locks: {instead}", file=sys.stderr)
        return True

    def _beats(self) -> bool:
        """Return True unless this process has watched the holder for STALE_S without a change of its time stamp."""
        beat = (self._holder, os.fstat(self._file).st_mtime_ns)
        now = time.monotonic()
        if beat != self._beat_of:
            self._beat_of = beat
            self._changed = now
        return now < self._changed + STALE_S

    def _renew(self) -> None:
        """Renew the heartbeat until the lock is released.

        If another process has taken the lock, because it believed this one dead, this process ends at once.
        """
        while not self._released.wait(BEAT_S):
            with suppress(OSError):
                holder = _holder_at(self.path)
                if holder not in ("", self.own) and not self._released.is_set():
                    os.write(2, f"{self.run_dir} was taken over by {holder}; this process ends\n".encode())
                    os._exit(1)
                os.utime(self._file)


def _lock(file: int) -> bool | None:
    """Lock an open file. Returns False if another process holds the lock, None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _is_at(path: Path, file: int) -> bool:
    """Return True if an open file is still the file at this path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file))
    return False


def _read(file: int) -> str:
    """Read the record in an open file: the holder's name, or an empty string."""
    return os.pread(file, SIZE, 0).decode(errors="replace").strip()


def _holder_at(path: Path) -> str:
    """Read the holder's name from the file at a path.

    The file is opened again each time, since a network file system may show old content through an open file.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        return _read(file)
    finally:
        os.close(file)
