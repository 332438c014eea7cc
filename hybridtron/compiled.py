"""C++ that is compiled where it first runs, kept in the user's own cache, and loaded only as it was written.

    load("native", "NAME.so", compile)    the library of this name, compiled where it is absent or damaged

A caller gives a name that says all that the library depends on. Beside it stand NAME.so.sha256, its size and digest,
and NAME.so.lock, which one process at a time holds while it compiles; the others wait, on all machines that share the
folder if its file system has locks. A library is written to a temporary folder and renamed when it is complete, with
its record.

Code is mapped into this process as it stands in the file: a page that is missing ends the process by SIGBUS, and one of
zeros computes something else. So each start reads the file and compares size and digest, through the descriptor that it
is then loaded by, and a file that differs is made again. Who could put a library and its record there is
`own_folders.py`'s matter. Nothing here imports torch.
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
BUILD_S = 1800.0  # longer than any compiler needs on a busy machine; one that hangs ends the attempt
ELSEWHERE = "(XDG_CACHE_HOME=FOLDER names another place)"
SILENT_S = 3.0  # a process that waits longer for another one says so

LOG = logging.getLogger(__name__)


class NotBuilt(Exception):
    """There is no library; the message is the reason, on one line."""


class DamagedLibrary(Exception):
    """A library's file differs from what was written; the message says how, and is empty where there is no file."""


@dataclass(frozen=True)
class LoadedLibrary:
    """A library's functions, and the damage of the file that it replaces; empty where there was none."""

    functions: ctypes.CDLL
    repaired: str


def compiler() -> Path:
    """The user's choice, which alone is tried then, or one on the path. Raises NotBuilt."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else COMPILERS:
        if found := shutil.which(name):
            return Path(found).resolve()
    raise NotBuilt(f"CXX={chosen} is no program" if chosen else f"no C++ compiler ({', '.join(COMPILERS)}; CXX=...)")


def load(folder: str, name: str, make: Callable[[Path], None], mode: int = ctypes.DEFAULT_MODE) -> LoadedLibrary:
    """Load the library of this name; `make` compiles it where it is absent or damaged. Raises NotBuilt."""
    with _own_cache(folder) as own:
        repaired = ""
        try:
            file = open_whole(own, name)
        except DamagedLibrary as damage:
            repaired = str(damage)
            file = _built(own, name, make)
        with file:
            return LoadedLibrary(_linked(file, own.path / name, mode), repaired)


def state(folder: str, name: str) -> str | None:
    """Describe the damage of a library: empty where there is none, None where it is whole. Raises NotBuilt."""
    with _own_cache(folder) as own:
        try:
            open_whole(own, name).close()
        except DamagedLibrary as damage:
            return str(damage)
    return None


def cache_folder(name: str) -> Path:
    """A folder of the user's own, made if need be. Raises NotBuilt."""
    with _own_cache(name) as own:
        return own.path


def build(path: Path, make: Callable[[Path], None]) -> None:
    """Let `make` write a file to a temporary place, then give it its name. Raises NotBuilt."""
    try:
        write_whole(path.parent, [path.name], lambda temporary: make(temporary / path.name))
    except OSError as error:
        raise NotBuilt(f"{error} {ELSEWHERE}") from None


@contextmanager
def _own_cache(name: str) -> Iterator[OwnFolder]:
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
    """Open a library if its bytes are those that were written. Raises DamagedLibrary, or NotOwn."""
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
    """Open a file; None where there is none. Raises DamagedLibrary where it can't be opened, and NotOwn."""
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
    """Compose the record that is kept beside a library: its size, its digest and its name."""
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{os.fstat(file.fileno()).st_size} {digest} {name}\n".encode()


def _built(folder: OwnFolder, name: str, make: Callable[[Path], None]) -> BufferedReader:
    """Compile a library, or wait for another process that does, and open it. Raises NotBuilt."""

    def fill(temporary: Path) -> None:
        library = temporary / name
        record = temporary / _record_of(name)
        make(library)
        library.chmod(0o700)  # whatever the user's mask is
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
            reason = f"{error} {ELSEWHERE}" if isinstance(error, OSError) else str(error)
            turn.note(reason)
            raise NotBuilt(reason) from None


@dataclass(frozen=True)
class BuildTurn:
    """A process's turn to compile: the lock's file, which holds why the attempt before failed."""

    lock: int
    waited: bool

    def failure(self) -> str:
        """Why the process that was waited for made nothing, so that this one would not either; else empty."""
        return os.pread(self.lock, 4096, 0).decode(errors="replace") if self.waited else ""

    def note(self, reason: str) -> None:
        """Leave it for those that wait."""
        with suppress(OSError):  # a full disk may be the reason
            os.ftruncate(self.lock, 0)
            os.pwrite(self.lock, reason.encode(), 0)


@contextmanager
def _turn(folder: OwnFolder, name: str) -> Iterator[BuildTurn]:
    """One process at a time, where the file system has locks. Raises NotBuilt after a long time."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    path = folder.path / f"{name}.lock"
    with os.fdopen(os.open(path.name, flags, 0o600, dir_fd=folder.descriptor), "rb+", buffering=0) as lock:
        began, waited, said = time.monotonic(), False, False
        while not _locked(lock.fileno()):
            passed, waited = time.monotonic() - began, True
            if passed > BUILD_S:
                raise NotBuilt(f"another process has held {path} for {BUILD_S:.0f} s")
            if passed > SILENT_S and not said:
                LOG.warning(f"waiting for another process that compiles {folder.path / name}")
                said = True
            time.sleep(0.1)
        yield BuildTurn(lock.fileno(), waited)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        LOG.debug(f"no lock: {error}")
    return True


def _linked(file: BufferedReader, path: Path, mode: int) -> ctypes.CDLL:
    """Load a library from its open file, not from a file that gets its name meanwhile, where the system allows that.

    The descriptor stays open: the loader knows libraries by their paths, and would take another file that is opened
    under the same number for this one.
    """
    descriptor = os.dup(file.fileno())
    opened = f"/proc/self/fd/{descriptor}"
    try:
        return ctypes.CDLL(opened if Path(opened).exists() else str(path), mode)
    except OSError as error:
        os.close(descriptor)
        raise OSError(str(error).replace(opened, str(path))) from None


def run_compiler(program: Path, options: Sequence[str], target: Path) -> None:
    """Make one file. Raises NotBuilt with what the compiler said first of an error."""
    try:
        done = subprocess.run(
            [str(program), *options, "-o", str(target)], capture_output=True, text=True, errors="replace",
            timeout=BUILD_S, stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(target.parent)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotBuilt(f"{program} does not end within {BUILD_S:.0f} s") from None
    if done.returncode != 0 or not target.is_file():
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower() or "No space" in line]
        said = (lines or done.stderr.splitlines() or ["no message"])[0].strip()
        raise NotBuilt(f"{program} ends with {done.returncode}: {said}")
