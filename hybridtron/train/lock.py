"""Lock on a run's folder, so that one run has one writer.

The run's first process locks the file RUN/.lock before it reads anything in the folder, and holds the lock until it
ends. The operating system provides the lock (flock), and releases it when the process ends, even if the process is
killed. The process that has the lock is called the holder. The file contains a record with the holder's name. As a
heartbeat, the holder updates the file's modification time every BEAT_S seconds.

The heartbeat decides in two cases in which flock does not suffice:

    - The file system has no locks.
    - The holder runs on another machine, and the file system applies locks only within a machine.

In both cases a holder is considered dead after STALE_S seconds in which the modification time has not changed. A
waiting process compares the modification time only with earlier modification times, never with a clock, because clocks
differ between machines and may jump.

Only commands that write to the run's folder take the lock.
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
PATIENCE_S = GRACE_S + 10.0  # seconds to wait for the lock; a process whose torchrun was killed ends within GRACE_S
SLURM_PATIENCE_S = 120.0  # seconds to wait in a SLURM job; NFS releases the locks of a dead node after 90 s
BEAT_S = 2.0  # seconds between heartbeats
STALE_S = 20.0  # seconds without a heartbeat after which a holder is considered dead
SETTLE_S = 1.0  # seconds after which processes that wrote to the file at the same time all read the same record
POLL_INTERVAL_S = 0.2  # seconds between attempts to take the lock
SIZE = 512  # bytes in the record and in the file; the size is constant, so that one write replaces the full record
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # errors of a file system without locks


class RunLock:
    """Context manager that holds the lock of a run's folder; a missing folder is created.

    Entering the context waits while another process holds the lock. It raises ConfigError if the folder can't be used,
    if the lock is not free after `patience_s` seconds, or if `given_up` returns True during the wait.
    """

    def __init__(self, run_dir: Path, given_up: Callable[[], bool] = lambda: False) -> None:
        self.run_dir = run_dir
        self.path = run_dir / FILE
        self.given_up = given_up
        if "SLURM_JOB_ID" in os.environ:
            self.patience_s = SLURM_PATIENCE_S
        else:
            self.patience_s = PATIENCE_S
        self.here = f" on {socket.gethostname()} since "  # the records of all holders on this machine contain this text
        self.own = f"process {os.getpid()}{self.here}{datetime.now(UTC).isoformat(' ', 'microseconds')}"
        self._holder = ""  # the holder's name that was read last
        self._beat_of: tuple[str, int] | None = None  # the last observed holder, and the file's modification time
        self._changed = 0.0  # time on the monotonic clock at which the values in `_beat_of` were first observed
        self._released = threading.Event()

    def __enter__(self) -> Self:
        self._made = False
        try:
            self._made = not self.run_dir.exists()
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._wait()
        except ConfigError:
            raise
        except (OSError, ValueError) as error:  # Python raises ValueError if the name has a NUL character
            self._remove_empty()
            if isinstance(error, OSError):
                reason = error.strerror
            else:
                reason = error
            raise ConfigError(
                [Problem("run.dir", "unreadable", f"{self.run_dir} can't be used: {reason}; name another folder")]
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
        """Remove the run's folder if this process created it and it is still empty, apart from an empty logs/."""
        with suppress(OSError, ValueError):
            if self._made:
                with suppress(FileNotFoundError):
                    (self.run_dir / "logs").rmdir()
                self.run_dir.rmdir()

    def _wait(self) -> None:
        """Wait until the lock can be taken, and take it.

        Raises ConfigError after `patience_s` seconds, or when `given_up` returns True.
        """
        until = time.monotonic() + self.patience_s
        reported = False
        while not self._try_take():
            holder = self._holder or "another process"
            if time.monotonic() > until or self.given_up():
                cure = "stop that process, or name another folder"
                raise ConfigError([Problem("run.dir", "in-use", f"{self.run_dir} is in use by {holder}: {cure}")])
            if not reported:
                waits = f"waiting up to {self.patience_s:.0f} s until it is free"
                print(f"{self.run_dir} is in use by {holder}; {waits}", file=sys.stderr, flush=True)
                reported = True
            time.sleep(POLL_INTERVAL_S)

    def _try_take(self) -> bool:
        """Try to take the lock once; return True on success. Then the lock's file stays open as `self._file`."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        acquired = False
        try:
            locked = _lock(self._file)
            self._holder = _read(self._file)
            if locked is False or not _is_at(self.path, self._file):  # a holder has just removed the opened file
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
        except OSError:  # the disk is full: remove the file, whose record may be incomplete
            self.path.unlink()
            raise

    def _settled(self) -> bool:
        """Return True if this process has become the holder, on a file system without locks.

        If a holder is dead, several processes may overwrite its record at the same time. The process that writes last
        becomes the holder. After SETTLE_S seconds all these processes read the last record.
        """
        time.sleep(SETTLE_S)
        self._holder = _holder_at(self.path)
        if self._holder != self.own:
            return False
        instead = f"a heartbeat in {self.path} replaces them, and a start after a crash must wait {STALE_S:.0f} s"
        print(f"warning: the file system of {self.run_dir} has no locks: {instead}", file=sys.stderr)
        return True

    def _beats(self) -> bool:
        """Return False if the holder and the modification time have not changed for STALE_S seconds, else True."""
        beat = (self._holder, os.fstat(self._file).st_mtime_ns)
        now = time.monotonic()
        if beat != self._beat_of:
            self._beat_of = beat
            self._changed = now
        return now < self._changed + STALE_S

    def _renew(self) -> None:
        """Renew the heartbeat until the lock is released.

        If another process has considered this process dead and has taken the lock, end this process immediately.
        """
        while not self._released.wait(BEAT_S):
            with suppress(OSError):
                holder = _holder_at(self.path)
                if holder not in ("", self.own) and not self._released.is_set():
                    os.write(2, f"{self.run_dir} was taken over by {holder}; this process ends\n".encode())
                    os._exit(1)
                os.utime(self._file)


def _lock(file: int) -> bool | None:
    """Lock an open file with flock, and return True on success.

    Return False if another process holds the lock, and None if the file system has no locks.
    """
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
    """Return True if an open file is still the file at `path`, not removed or replaced."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file))
    return False


def _read(file: int) -> str:
    """Read the holder's name from an open file; an empty string if the file is empty."""
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
