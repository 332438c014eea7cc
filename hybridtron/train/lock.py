"""One run, one writer: the first process holds RUN/.lock from before it looks into the folder until it ends.

The lock is the kernel's (flock), which takes it back when the process dies, however it dies. The file says who holds
it, and its time stamp is renewed every BEAT_S: a heartbeat, which decides where the file system has no locks, or where
the holder runs on another machine, since some file systems keep locks to one machine. A holder whose time stamp has not
changed for STALE_S is gone. Only whether it changes counts, not what it says: clocks differ, and they jump.

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
PATIENCE_S = GRACE_S + 10.0  # how long a start waits: an orphan of a killed launcher has ended by then
SLURM_PATIENCE_S = 120.0  # nobody sits and waits, and NFS keeps the locks of a dead node for its lease of 90 s
BEAT_S, STALE_S = 2.0, 20.0
SETTLE_S = 1.0  # until two that take over a silent holder's file at once see which of them wrote last
LOOK_S = 0.2
SIZE = 512  # of the file, so that a record replaces another in one write
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class RunLock:
    """Holds a run's folder from its start as a context to its end; makes the folder where there is none.

    Raises ConfigError if the folder can't be used, or is another's until the patience ends or `given_up`.
    """

    def __init__(self, run_dir: Path, given_up: Callable[[], bool] = lambda: False) -> None:
        self.run_dir, self.path, self.given_up = run_dir, run_dir / FILE, given_up
        self.patience_s = SLURM_PATIENCE_S if "SLURM_JOB_ID" in os.environ else PATIENCE_S
        self.here = f" on {socket.gethostname()} since "
        self.own = f"process {os.getpid()}{self.here}{datetime.now(UTC).isoformat(' ', 'microseconds')}"
        self._holder = ""
        self._beat_of: tuple[str, int] | None = None  # the holder that was seen last, and its time stamp
        self._changed = 0.0
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
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError([Problem("run.dir", f"{self.run_dir} can't be used: {reason}; name a folder")]) from error
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
        """A start that was refused leaves no folder behind."""
        with suppress(OSError, ValueError):
            if self._made:
                with suppress(FileNotFoundError):
                    (self.run_dir / "logs").rmdir()
                self.run_dir.rmdir()

    def _wait(self) -> None:
        """Take the lock when its holder lets go of it."""
        until, reported = time.monotonic() + self.patience_s, False
        while not self._taken():
            holder = self._holder or "another process"
            if time.monotonic() > until or self.given_up():
                cure = "stop it, or name another folder"
                raise ConfigError([Problem("run.dir", f"{self.run_dir} is in use by {holder}: {cure}")])
            if not reported:
                waits = f"waiting up to {self.patience_s:.0f} s"
                print(f"{self.run_dir} is in use by {holder}; {waits}", file=sys.stderr, flush=True)
                reported = True
            time.sleep(LOOK_S)

    def _taken(self) -> bool:
        """Whether the lock could be taken now."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        taken = False
        try:
            locked = _lock(self._file)
            self._holder = _read(self._file)
            if locked is False or not _is_at(self.path, self._file):  # the latter: it was just let go of
                return False
            by_heartbeat = locked is None or self.here not in self._holder
            if self._holder and by_heartbeat and self._beats():
                return False
            self._write_own()
            taken = locked is not None or self._settled()
            return taken
        finally:
            if not taken:
                os.close(self._file)

    def _write_own(self) -> None:
        try:
            os.pwrite(self._file, f"{self.own:<{SIZE - 1}}\n".encode(), 0)
            os.fsync(self._file)
        except OSError:  # a full disk
            self.path.unlink()
            raise

    def _settled(self) -> bool:
        """Whether this process wrote last, of those that take a file over that can't be locked."""
        time.sleep(SETTLE_S)
        self._holder = _holder_at(self.path)
        if self._holder != self.own:
            return False
        instead = f"a heartbeat in {self.path} takes their place, and a start after a crash waits {STALE_S:.0f} s"
        print(f"warning: the file system of {self.run_dir} has no locks: {instead}", file=sys.stderr)
        return True

    def _beats(self) -> bool:
        """Whether the holder has renewed its time stamp in the last STALE_S, or was not watched for as long."""
        beat, now = (self._holder, os.fstat(self._file).st_mtime_ns), time.monotonic()
        if beat != self._beat_of:
            self._beat_of, self._changed = beat, now
        return now < self._changed + STALE_S

    def _renew(self) -> None:
        """The heartbeat. A process that was thought dead, and whose folder another has taken, ends at once."""
        while not self._released.wait(BEAT_S):
            with suppress(OSError):
                holder = _holder_at(self.path)
                if holder not in ("", self.own) and not self._released.is_set():
                    os.write(2, f"{self.run_dir} was taken over by {holder}; this process ends\n".encode())
                    os._exit(1)
                os.utime(self._file)


def _lock(file: int) -> bool | None:
    """Lock an open file; False where another has, None where the file system has no locks."""
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
    """Whether an open file is still the one at its path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file))
    return False


def _read(file: int) -> str:
    """Who wrote an open file; nothing where nobody has."""
    return os.pread(file, SIZE, 0).decode(errors="replace").strip()


def _holder_at(path: Path) -> str:
    """Who holds a lock; the file is opened again, or a network file system may show what it was."""
    file = os.open(path, os.O_RDONLY)
    try:
        return _read(file)
    finally:
        os.close(file)
