"""Build and load the compiled ops: the C++ beside this file, compiled at first use and kept in the user's cache.

    library()            the loaded functions, or the reason why there are none and the ops run in torch alone
    call("f", task, n)   call function f on a task structure with n threads

A build's file name is a digest of everything that it depends on: sources, compiler, flags and CPU. If the compiler
changes, or another kind of node shares the home directory, no file has that name and a new one is built. A damaged file
is built again (`hybridtron/compiled.py`).

Not here: the functions' mathematics (the sources), and the ops that use them (`native.py` in the ops' folders).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridtron import compiled
from hybridtron.compiled import NotBuilt, compiler, run_compiler

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti",
    "-fPIC", "-pthread", "-w",
)  # fmt: skip
"""Without -ffast-math: it would fold the sums that round an exponent, and assume that no value is infinite."""


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded functions, or None, and how the library was built or why it was not."""

    functions: ctypes.CDLL | None
    reason: str


@functools.cache
def library() -> NativeLibrary:
    """Load the library, building it if needed. Cached per process; forked children inherit it from their parent."""
    try:
        build = Build.here()
        loaded = compiled.load("native", f"{build.digest}.so", build.compile)
        made_again = f"built for this CPU, again: {loaded.repaired}"
        return NativeLibrary(loaded.functions, made_again if loaded.repaired else "built for this CPU")
    except (NotBuilt, OSError) as error:
        return NativeLibrary(None, f"not built: {error}")


def missing() -> str | None:
    """Return the reason why compiled forms can't run here, or None if they can."""
    loaded = library()
    if loaded.functions is None:
        return loaded.reason
    return None


def call(name: str, task: ctypes.Structure, threads: int) -> None:
    """Run a compiled function; ctypes releases the GIL meanwhile. Raises MemoryError if it gets no scratch memory."""
    functions = library().functions
    assert functions is not None, "missing() says whether there is a library"
    if getattr(functions, name)(ctypes.byref(task), threads) != 0:
        raise MemoryError(f"{name} found no memory for its scratch space")


@functools.cache
def constant(name: str) -> int:
    """Return a size that the sources fix: `chunk_tokens` between kept states, `token_block`, `attention_piece`, ..."""
    functions = library().functions
    assert functions is not None, "missing() says whether there is a library"
    return getattr(functions, name)()


def token_blocks(tokens: int) -> int:
    """Return the number of token blocks: gradients of parameters are summed within each, then over all."""
    return -(-tokens // constant("token_block"))


@dataclass(frozen=True)
class Build:
    """The compiler, flags and CPU of a build, and the digest that names it."""

    compiler: Path
    flags: tuple[str, ...]
    cpu: str

    @staticmethod
    def here() -> Build:
        """Return the build for this machine. Raises NotBuilt if it has no compiler."""
        if platform.machine() in ("aarch64", "arm64"):
            native = "-mcpu=native"
        else:
            native = "-march=native"
        if sys.platform == "darwin":
            linked = ()
        else:
            linked = ("-Wl,--as-needed",)
        return Build(compiler(), (*FLAGS, native, *linked), cpu_features())

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
        """Compile all sources in parallel and link them into one library. Raises NotBuilt if the compiler fails."""
        objects = [target.with_name(f"{source.stem}.o") for source in self.sources]
        with ThreadPoolExecutor(processors()) as pool:
            for _ in pool.map(self._run, [["-c", str(source)] for source in self.sources], objects):
                pass
        self._run([*map(str, objects), "-shared"], target)

    def _run(self, arguments: list[str], target: Path) -> None:
        run_compiler(self.compiler, [*self.flags, *arguments], target)


def cpu_features() -> str:
    """Return the system's description of this CPU's features.

    It is part of a build's name, because code that was compiled for one kind of CPU can crash on another.
    """
    try:
        with Path("/proc/cpuinfo").open() as file:
            first = "".join(iter(file.readline, "\n"))  # the first core only: a node can have hundreds
        wanted = ("flags", "features", "model", "cpu part", "isa")
        return "".join(line for line in first.splitlines(True) if line.lower().startswith(wanted))
    except OSError:
        return f"{platform.processor()} {platform.release()}"


def threads(worth: float) -> int:
    """Return the number of threads for some work: at most torch's (OMP_NUM_THREADS) and the cgroup's CPU limit.

    `worth` is the amount of work, in units that repay one more thread.
    """
    return max(1, min(torch.get_num_threads(), _allowed(), 1 + int(worth)))


def processors() -> int:
    """Count the processors that this process may run on at once."""
    if sys.platform == "linux":
        bound = len(os.sched_getaffinity(0))
    else:
        bound = os.cpu_count() or 1
    return max(1, min(bound, _allowed()))


@functools.cache
def _allowed() -> int:
    listing = Path("/proc/self/cgroup")
    return min(map(quota, cgroups(Path("/sys/fs/cgroup"), listing.read_text() if listing.exists() else "")))


def cgroups(root: Path, own: str) -> list[Path]:
    """List the cgroup folders whose limits apply to a process; inside a container only the root is visible.

    `own` is the text of its /proc/self/cgroup.
    """
    below = next((line.removeprefix("0::/") for line in own.splitlines() if line.startswith("0::/")), "")
    folder = root / below
    return [root, *(path for path in (folder, *folder.parents) if root in path.parents and ".." not in path.parts)]


def quota(root: Path) -> int:
    """Return the number of processors that a cgroup's limit allows, rounded up; sys.maxsize without a limit."""
    try:
        if (root / "cpu.max").exists():
            limit, period = (root / "cpu.max").read_text().split()
        else:
            limit = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        if int(limit) > 0:
            return math.ceil(int(limit) / int(period))
        return sys.maxsize
    except (OSError, ValueError):  # no cgroup, or "max"
        return sys.maxsize
