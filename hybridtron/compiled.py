"""Cache of compiled C++ libraries: compiled at first use, stored in the user's cache, and verified at each load.

    load("native", "NAME.so", compile)    load this library; compile it first if it is missing or damaged

The name must encode everything that the library depends on. Two files accompany it: NAME.so.sha256 records its size
and digest, and NAME.so.lock is held by one process at a time while it compiles. The others wait, also on other machines
that share the folder, if its file system has locks. A library is written to a temporary folder and, when it is
complete, renamed together with its record.

The loader maps the file into this process, so damage would be dangerous: a missing page ends the process by SIGBUS, and
a page of zeros computes nonsense. So each start reads the file and compares size and digest, through the same
descriptor that the library is then loaded from. A damaged file is compiled again. `own_folders.py` ensures that no
other user can replace a library and its record. Nothing here imports torch.
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
BUILD_S = 1800.0  # time limit of a compiler, also for waiting processes: longer than any needs on a busy machine
ELSEWHERE = "(XDG_CACHE_HOME=FOLDER names another place)"
SILENT_S = 3.0  # a process that waits longer for another one logs a warning

LOG = logging.getLogger(__name__)


class NotBuilt(Exception):
    """Raised when a library can't be had; the message is the reason, on one line."""


class DamagedLibrary(Exception):
    """Raised when a library's file differs from its record; the message is empty if there is no file."""


@dataclass(frozen=True)
class LoadedLibrary:
    """A loaded library. `repaired` describes the damaged file that it has replaced, or is empty."""

    functions: ctypes.CDLL
    repaired: str


def compiler() -> Path:
    """Find a C++ compiler: only $CXX if it is set, else the first one on the path. Raises NotBuilt."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else COMPILERS:
        if program := shutil.which(name):
            return Path(program).resolve()
    raise NotBuilt(f"CXX={chosen} is not a program" if chosen else f"no C++ compiler ({', '.join(COMPILERS)}; CXX=...)")


def load(folder: str, name: str, make: Callable[[Path], None], mode: int = ctypes.DEFAULT_MODE) -> LoadedLibrary:
    """Load a library from the user's cache; `make` compiles it if it is missing or damaged. Raises NotBuilt."""
    with _own_cache(folder) as cache:
        repaired = ""
        try:
            file = open_whole(cache, name)
        except DamagedLibrary as damage:
            repaired = str(damage)
            file = _built(cache, name, make)
        with file:
            return LoadedLibrary(_linked(file, cache.path / name, mode), repaired)


def state(folder: str, name: str) -> str | None:
    """Return None if a library is valid, else its damage; an empty string if it is missing. Raises NotBuilt."""
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
    """Write a file atomically: `make` writes it to a temporary folder, then it is renamed. Raises NotBuilt."""
    try:
        write_whole(path.parent, [path.name], lambda temporary: make(temporary / path.name))
    except OSError as error:
        raise NotBuilt(f"{error} {ELSEWHERE}") from None


@contextmanager
def _own_cache(name: str) -> Iterator[OwnFolder]:
    """Open a folder in the user's cache that other users can't change. Raises NotBuilt."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise NotBuilt(f"no home directory for the cache {ELSEWHERE}") from None
    try:
        with own_folder(base, "hybridtron", name) as folder:
            yield folder
    except OSError as error:
        raise NotBuilt(f"{error} {ELSEWHERE}") from None


def open_whole(folder: OwnFolder, name: str) -> BufferedReader:
    """Open a library after comparing it with its record. Raises DamagedLibrary, or NotOwn."""
    path = folder.path / name
    file = _opened(folder, name)
    if file is None:
        raise DamagedLibrary("")
    try:
        record = _opened(folder, _record_of(name))
        if record is None:
            raise DamagedLibrary(f"{path} had no record of its digest beside it")
        with record:
            recorded = record.read(4096)
        size = os.fstat(file.fileno()).st_size
        if (said := recorded.partition(b" ")[0]).isdigit() and int(said) != size:
            raise DamagedLibrary(f"{path} had {size:,} bytes of {int(said):,}")
        if recorded != _record(name, file):
            raise DamagedLibrary(f"{path} had other bytes than were written")
    except BaseException:
        file.close()
        raise
    return file


def _opened(folder: OwnFolder, name: str) -> BufferedReader | None:
    """Open a file; return None if it is missing. Raises DamagedLibrary if it can't be opened, or NotOwn."""
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
    """Compute a library's record: its size, digest and name on one line."""
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{os.fstat(file.fileno()).st_size} {digest} {name}\n".encode()


def _built(folder: OwnFolder, name: str, make: Callable[[Path], None]) -> BufferedReader:
    """Compile a library, or wait for another process that does, and open it. Raises NotBuilt."""

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

    lock: descriptor of the lock's file, which also stores why the last attempt failed
    waited: this process had to wait for another one
    """

    lock: int
    waited: bool

    def failure(self) -> str:
        """Return why the process that this one has waited for failed, or an empty string.

        A second attempt would fail for the same reason.
        """
        if self.waited:
            return os.pread(self.lock, 4096, 0).decode(errors="replace")
        return ""

    def note(self, reason: str) -> None:
        """Store the reason of a failure for waiting processes; an empty one clears it."""
        with suppress(OSError):  # a full disk may be the reason
            os.ftruncate(self.lock, 0)
            os.pwrite(self.lock, reason.encode(), 0)


@contextmanager
def _turn(folder: OwnFolder, name: str) -> Iterator[BuildTurn]:
    """Hold the compile lock in the block, after waiting for it. Raises NotBuilt after BUILD_S.

    Without locks in the file system, processes don't wait for each other.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    path = folder.path / f"{name}.lock"
    with os.fdopen(os.open(path.name, flags, 0o600, dir_fd=folder.descriptor), "rb+", buffering=0) as lock:
        began = time.monotonic()
        waited = False
        said = False
        while not _locked(lock.fileno()):
            passed = time.monotonic() - began
            waited = True
            if passed > BUILD_S:
                raise NotBuilt(f"another process has held {path} for {BUILD_S:.0f} s")
            if passed > SILENT_S and not said:
                LOG.warning(f"waiting for another process that compiles {folder.path / name}")
                said = True
            time.sleep(0.1)
        yield BuildTurn(lock.fileno(), waited)


def _locked(lock: int) -> bool:
    """Try to take the lock. Returns False if another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        LOG.debug(f"no lock: {error}")
    return True


def _linked(file: BufferedReader, path: Path, mode: int) -> ctypes.CDLL:
    """Load a library from its open, verified file, through /proc where the system has it.

    So a file that replaces it at its path in the meantime is not loaded. The descriptor stays open: the loader
    identifies libraries by path, and would confuse this one with a later file under the same descriptor number.
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
        raise NotBuilt(f"{program} does not end within {BUILD_S:.0f} s") from None
    if done.returncode != 0 or not target.is_file():
        lines = [line for line in done.stderr.splitlines() if "error: " in line.lower() or "No space" in line]
        said = (lines or done.stderr.splitlines() or ["no message"])[0].strip()
        raise NotBuilt(f"{program} ends with {done.returncode}: {said}")
