"""The one owner of compiled code: the C++ beside this file, built where it first runs and kept in the user's cache.

    library()            the functions, or the reason why there are none and the ops run in torch alone
    call("f", task, n)   one of them, on a structure and n threads

A build is named by all that it depends on: sources, compiler, flags and the CPU. So a changed compiler, or another kind
of node on the same home directory, finds no file of its name and makes one. It is written to a temporary folder and
renamed when it is complete, by each of several processes that begin at once; the last one stays, and all are the same.

Not here: what the functions compute (the sources), and which op uses them (`native.py` in the ops' folders).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
BUILD_S = 300.0  # longer than any compiler needs on a busy machine; one that hangs ends the attempt
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti",
    "-fPIC", "-pthread", "-w",
)  # fmt: skip
"""Not -ffast-math: it folds the sums that round an exponent, and assumes that nothing is infinite."""


class NotBuilt(Exception):
    """There is no library; the message is the reason that the kernels' table shows."""


@dataclass(frozen=True)
class NativeLibrary:
    """The functions, or None and why."""

    functions: ctypes.CDLL | None
    reason: str


@functools.cache
def library() -> NativeLibrary:
    """Found or built once for each process; forked children have it from their parent."""
    try:
        return NativeLibrary(_opened(Build.here()), "built for this CPU")
    except (NotBuilt, OSError) as error:
        return NativeLibrary(None, f"not built: {error}")


def missing() -> str | None:
    """Why compiled forms can't run here, or None."""
    found = library()
    return found.reason if found.functions is None else None


def call(name: str, task: ctypes.Structure, threads: int) -> None:
    """Run a function of the library; ctypes lets other Python threads run meanwhile."""
    functions = library().functions
    assert functions is not None, "missing() says whether there is a library"
    if getattr(functions, name)(ctypes.byref(task), threads) != 0:
        raise MemoryError(f"{name} found no memory for its scratch space")


def token_blocks(tokens: int) -> int:
    """How many sums over blocks of tokens are made before they are added up."""
    functions = library().functions
    assert functions is not None, "missing() says whether there is a library"
    return -(-tokens // functions.token_block())


@dataclass(frozen=True)
class Build:
    """What a library is made by, and the name that this gives it."""

    compiler: Path
    flags: tuple[str, ...]
    cpu: str

    @staticmethod
    def here() -> Build:
        """For this machine. Raises NotBuilt."""
        native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
        linked = () if sys.platform == "darwin" else ("-Wl,--as-needed",)
        return Build(_compiler(), (*FLAGS, native, *linked), cpu_features())

    @functools.cached_property
    def digest(self) -> str:
        seen = self.compiler.stat()
        about = (self.compiler, seen.st_size, seen.st_mtime_ns, self.flags, self.cpu, platform.machine(), sys.platform)
        digest = hashlib.sha256(repr(about).encode())
        for path in sorted(SOURCES.glob("*.h")) + self.sources:
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:24]

    @property
    def sources(self) -> list[Path]:
        return sorted(SOURCES.glob("*.cpp"))

    def compile(self, target: Path) -> None:
        """Raises NotBuilt with what the compiler said last."""
        objects = [target.with_name(f"{source.stem}.o") for source in self.sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(self._run, [["-c", str(source)] for source in self.sources], objects):
                pass
        self._run([*map(str, objects), "-shared"], target)

    def _run(self, arguments: list[str], target: Path) -> None:
        command = [str(self.compiler), *self.flags, f'-DDIGEST="{self.digest}"', *arguments, "-o", str(target)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=BUILD_S, stdin=subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C", "TMPDIR": str(target.parent)},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotBuilt(f"{self.compiler} does not end within {BUILD_S:.0f} s") from None
        if done.returncode != 0 or not target.is_file():
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower() or "No space" in line]
            said = (lines or done.stderr.splitlines() or ["no message"])[0].strip()
            raise NotBuilt(f"{self.compiler} ends with {done.returncode}: {said}")


def _compiler() -> Path:
    """The user's choice, which alone is tried then, or one on the path."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else COMPILERS:
        if found := shutil.which(name):
            return Path(found).resolve()
    raise NotBuilt(f"CXX={chosen} is no program" if chosen else f"no C++ compiler ({', '.join(COMPILERS)}; CXX=...)")


def cpu_features() -> str:
    """What this CPU can compute, in the words of the system: programs built for one kind may end another's process."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            first = "".join(iter(file.readline, "\n"))  # of one core: a node can have hundreds
        wanted = ("flags", "features", "model", "cpu part", "isa")
        return "".join(line for line in first.splitlines(True) if line.lower().startswith(wanted))
    except OSError:
        return f"{platform.processor()} {platform.release()}"


def cache_folder() -> Path:
    """The user's own, made if need be. Raises NotBuilt or OSError."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise NotBuilt("no home directory for the cache (XDG_CACHE_HOME=FOLDER names another place)") from None
    folder = base / "hybridtron" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NotBuilt(f"{error} (XDG_CACHE_HOME=FOLDER names another place)") from None
    if folder.stat().st_uid != os.getuid():
        raise NotBuilt(f"{folder} belongs to another user (XDG_CACHE_HOME=FOLDER names another place)")
    return folder


def _opened(build: Build) -> ctypes.CDLL:
    """The library in the cache; a file that can't be used is made again. Raises NotBuilt."""
    path = cache_folder() / f"{build.digest}.so"
    if path.is_file():
        try:
            return _loaded(path, build)
        except NotBuilt:
            pass  # cut short by a full disk or a lost node
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as temporary:
            made = Path(temporary) / path.name
            build.compile(made)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            made.replace(path)
    except OSError as error:
        raise NotBuilt(f"{error} (XDG_CACHE_HOME=FOLDER names another place)") from None
    return _loaded(path, build)


def _loaded(path: Path, build: Build) -> ctypes.CDLL:
    """Raises NotBuilt: on a file system without execution, in a folder for another CPU, in half a file."""
    try:
        functions = ctypes.CDLL(str(path))
        functions.digest.restype = ctypes.c_char_p
        found = functions.digest().decode()
    except (OSError, AttributeError) as error:
        raise NotBuilt(f"{error} (XDG_CACHE_HOME=FOLDER names another place)") from None
    if found != build.digest:
        raise NotBuilt(f"{path} holds the build {found}")
    return functions


def threads(worth: float) -> int:
    """As many as torch uses (OMP_NUM_THREADS), as the cgroup lets run at once, and as the work is worth."""
    return max(1, min(torch.get_num_threads(), _allowed(), 1 + int(worth)))


@functools.cache
def _allowed() -> int:
    return quota(Path("/sys/fs/cgroup"))


def quota(root: Path) -> int:
    """Processors that a cgroup's limit amounts to; as many as one likes where there is none."""
    try:
        if (root / "cpu.max").exists():
            limit, period = (root / "cpu.max").read_text().split()
        else:
            limit = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        return math.ceil(int(limit) / int(period)) if int(limit) > 0 else sys.maxsize
    except (OSError, ValueError):  # no cgroup, or "max"
        return sys.maxsize
