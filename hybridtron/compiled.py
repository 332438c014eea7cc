"""Cache of compiled C++ libraries: compiled at first use, stored in the user's cache, and verified at each load.

    load("native", "NAME.so", compile)    load this library; compile it first if it is missing or damaged

NAME must encode everything that the library depends on, such as its sources and the compiler. Each library has two
further files:

    NAME.so.sha256    the library's record: its size and SHA-256 digest
    NAME.so.lock      a lock, which a process holds while it compiles the library

Other processes wait for the lock, even on other machines that share the folder, if the folder's file system supports
locks. A library is compiled in a temporary folder. When library and record are complete, both are moved to their final
paths.

The system's loader maps the library into this process, so a damaged file would be dangerous: a missing page ends the
process by SIGBUS, and a page of zeros gives wrong results. So each load first reads the file and compares its size and
digest with the record. The library is then loaded from the same file descriptor. A damaged library is compiled again.
`own_folders.py` ensures that no other user can replace a library and its record. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from hybridtron.own_folders import NotOwn, OwnFolder, own_folder, write_whole

COMPILERS = ("c++", "g++", "clang++")
BUILD_S = 1800.0  # time limit for compiling, and for waiting for another process; ample even on a busy machine
ELSEWHERE = "(XDG_CACHE_HOME=FOLDER selects another folder)"
SILENT_S = 3.0  # a process that waits longer than this for another process logs a warning

LOG = logging.getLogger(__name__)


class NotBuilt(Exception):
    """Raised when a library can neither be loaded nor compiled; the message is the reason, on one line."""


class DamagedLibrary(Exception):
    """Raised when a library's file is missing or differs from its record. For a missing file the message is empty."""


@dataclass(frozen=True)
class LoadedLibrary:
    """A loaded library. `repaired` describes the damaged file that this library replaced, or is empty."""

    functions: ctypes.CDLL
    repaired: str


def compiler() -> Path:
    """Return the C++ compiler: $CXX if it is set, else the first of COMPILERS on the PATH. Raises NotBuilt."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else COMPILERS:
        if program := shutil.which(name):
            return Path(program).resolve()
    raise NotBuilt(
        f"CXX={chosen} is not a program: set CXX to a C++ compiler"
        if chosen
        else f"no C++ compiler ({', '.join(COMPILERS)}) on the PATH: install one, or set CXX"
    )


def load(folder: str, name: str, make: Callable[[Path], None], mode: int = ctypes.DEFAULT_MODE) -> LoadedLibrary:
    """Load a library from the user's cache. Raises NotBuilt.

    If the library is missing or damaged, it is compiled by `make`, which gets the path to write.
    """
    with _own_cache(folder) as cache:
        repaired = ""
        try:
            file = open_whole(cache, name)
        except DamagedLibrary as damage:
            repaired = str(damage)
            file = _build(cache, name, make)
        with file:
            return LoadedLibrary(_link(file, cache.path / name, mode), repaired)


def state(folder: str, name: str) -> str | None:
    """Return None if a library is valid, else a text: the damage, or an empty string if the library is missing.

    Raises NotBuilt if the cache can't be used.
    """
    with _own_cache(folder) as cache:
        try:
            open_whole(cache, name).close()
        except DamagedLibrary as damage:
            return str(damage)
    return None


def cache_folder(name: str) -> Path:
    """Return a folder in the user's cache, created if necessary. Raises NotBuilt."""
    with _own_cache(name) as cache:
        return cache.path


def build(path: Path, make: Callable[[Path], None]) -> None:
    """Write a file atomically: `make` writes it to a temporary folder, then it is moved to `path`. Raises NotBuilt."""
    try:
        write_whole(path.parent, [path.name], lambda temporary: make(temporary / path.name))
    except OSError as error:
        raise NotBuilt(f"{error} {ELSEWHERE}") from None


def user_cache() -> Path:
    """Return the path of the user's cache. Raises NotBuilt if the user has no home directory."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise NotBuilt(f"no home directory for the cache {ELSEWHERE}") from None


@contextmanager
def _own_cache(name: str) -> Iterator[OwnFolder]:
    """Open a folder in the user's cache, and check that other users can't change the folder. Raises NotBuilt."""
    base = user_cache()
    try:
        with own_folder(base, "hybridtron", name) as folder:
            yield folder
    except OSError as error:
        raise NotBuilt(f"{error} {ELSEWHERE}") from None


def open_whole(folder: OwnFolder, name: str) -> BufferedReader:
    """Open a library after comparing the file with its record.

    Raises DamagedLibrary if the file differs from its record or is missing, and NotOwn if it belongs to another user.
    """
    path = folder.path / name
    file = _open_verified(folder, name)
    if file is None:
        raise DamagedLibrary("")
    try:
        record = _open_verified(folder, _record_of(name))
        if record is None:
            raise DamagedLibrary(f"{path} had no record of its digest ({_record_of(name)})")
        with record:
            recorded = record.read(4096)
        size = os.fstat(file.fileno()).st_size
        if (recorded_size := recorded.partition(b" ")[0]).isdigit() and int(recorded_size) != size:
            raise DamagedLibrary(f"{path} had {size:,} bytes instead of {int(recorded_size):,}")
        if recorded != _record(name, file):
            raise DamagedLibrary(f"{path} had changed since it was written")
    except BaseException:
        file.close()
        raise
    return file


def _open_verified(folder: OwnFolder, name: str) -> BufferedReader | None:
    """Open a file of the cache; return None if the file is missing.

    Raises DamagedLibrary if the file can't be opened, and NotOwn if it belongs to another user.
    """
    try:
        return folder.open(name)
    except FileNotFoundError:
        return None
    except NotOwn:
        raise
    except OSError as error:
        raise DamagedLibrary(f"{folder.path / name}: {error.strerror or error}") from None


def _record_of(name: str) -> str:
    return f"{name}.sha256"


def _record(name: str, file: BufferedReader) -> bytes:
    """Return the content of a library's record: size, digest and name on one line."""
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{os.fstat(file.fileno()).st_size} {digest} {name}\n".encode()


def _build(folder: OwnFolder, name: str, make: Callable[[Path], None]) -> BufferedReader:
    """Compile a library, or wait for another process that compiles it; return the opened file. Raises NotBuilt."""

    def fill(temporary: Path) -> None:
        library = temporary / name
        record = temporary / _record_of(name)
        make(library)
        library.chmod(0o700)  # regardless of the umask
        with library.open("rb") as file:
            record.write_bytes(_record(name, file))
        record.chmod(0o600)

    with _turn(folder, name) as turn:
        try:
            return open_whole(folder, name)
        except DamagedLibrary:
            if reason := turn.failure():
                raise NotBuilt(reason) from None
        turn.note("")
        try:
            write_whole(folder.path, [_record_of(name), name], fill)
            return open_whole(folder, name)
        except (NotBuilt, DamagedLibrary, OSError) as error:
            if isinstance(error, OSError):
                reason = f"{error} {ELSEWHERE}"
            else:
                reason = str(error)
            turn.note(reason)
            raise NotBuilt(reason) from None


@dataclass(frozen=True)
class BuildTurn:
    """A process's turn to compile, while it holds the lock.

    lock: descriptor of the lock file, whose content is the reason why the last attempt to compile failed
    waited: this process had to wait for another process
    """

    lock: int
    waited: bool

    def failure(self) -> str:
        """Return the reason of the last failure if this process had to wait, else an empty string.

        A process that has waited and still finds no valid library knows that the other process failed to compile. Its
        own attempt would fail for the same reason.
        """
        if self.waited:
            return os.pread(self.lock, 4096, 0).decode(errors="replace")
        return ""

    def note(self, reason: str) -> None:
        """Store the reason of a failure for waiting processes; an empty string clears the stored reason."""
        with suppress(OSError):  # a full disk may be the reason
            os.ftruncate(self.lock, 0)
            os.pwrite(self.lock, reason.encode(), 0)


@contextmanager
def _turn(folder: OwnFolder, name: str) -> Iterator[BuildTurn]:
    """Wait for the compile lock, and hold it in the block. Raises NotBuilt after waiting for BUILD_S seconds.

    On a file system without locks, processes don't wait for each other, and each process compiles the library.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    path = folder.path / f"{name}.lock"
    with os.fdopen(os.open(path.name, flags, 0o600, dir_fd=folder.descriptor), "rb+", buffering=0) as lock:
        began = time.monotonic()
        waited = False
        logged = False
        while not _try_lock(lock.fileno()):
            passed = time.monotonic() - began
            waited = True
            if passed > BUILD_S:
                raise NotBuilt(f"another process has held the lock {path} for {BUILD_S:.0f} s: end that process")
            if passed > SILENT_S and not logged:
                LOG.warning(f"waiting for another process that compiles {folder.path / name}")
                logged = True
            time.sleep(0.1)
        yield BuildTurn(lock.fileno(), waited)


def _try_lock(lock: int) -> bool:
    """Try to take the lock. Returns False if another process holds the lock; True on a file system without locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        LOG.debug(f"no lock: {error}")
    return True


def _link(file: BufferedReader, path: Path, mode: int) -> ctypes.CDLL:
    """Load a library from its open, verified file.

    If the system has /proc, the loader gets the file's path in /proc instead of its path in the cache. So a file that
    has since replaced the verified file in the cache is not loaded. The descriptor is never closed: the loader
    identifies libraries by path, and would mistake a later file with the same descriptor number for this library.
    """
    descriptor = os.dup(file.fileno())
    opened = f"/proc/self/fd/{descriptor}"
    try:
        return ctypes.CDLL(opened if Path(opened).exists() else str(path), mode)
    except OSError as error:
        os.close(descriptor)
        raise OSError(str(error).replace(opened, str(path))) from None


def run_compiler(program: Path, options: Sequence[str], target: Path) -> None:
    """Compile to one target file. Raises NotBuilt with the compiler's first error line."""
    try:
        done = subprocess.run(
            [str(program), *options, "-o", str(target)], capture_output=True, text=True, errors="replace",
            timeout=BUILD_S, stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(target.parent)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotBuilt(f"{program} did not end within {BUILD_S:.0f} s") from None
    if done.returncode != 0 or not target.is_file():
        lines = [line for line in done.stderr.splitlines() if "error: " in line.lower() or "No space" in line]
        message = (lines or done.stderr.splitlines() or ["no message"])[0].strip()
        raise NotBuilt(f"{program} ended with exit code {done.returncode}: {message}")
