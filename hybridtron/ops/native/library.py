"""The library of compiled CPU ops; it is built at first use and stored in the user's cache.

    library()            the loaded functions, or the reason why they could not be built
    call("f", task, n)   call function f with n threads; `task` is a ctypes structure with f's arguments

The C++ sources are in this folder. An op calls the library from the file `native.py` in the op's folder. If the library
can't be built, ops run in torch.

The library's file name is a digest of sources, compiler, flags and CPU features. So if the compiler changes, or if a
node with another CPU shares the home directory, a new library is built under another name. A damaged file is built
again (`hybridtron/compiled.py`).
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
"""Compiler flags. -ffast-math is not used: it assumes that no number is infinite or NaN, and it reorders sums."""


@dataclass(frozen=True)
class NativeLibrary:
    """The result of loading the library."""

    functions: ctypes.CDLL | None  # None if the library could not be built or loaded
    reason: str  # how the library was built, or why it was not built


@functools.cache
def library() -> NativeLibrary:
    """Load the library, and build it if needed. The result is cached; forked processes inherit it."""
    try:
        build = Build.here()
        loaded = compiled.load("native", f"{build.digest}.so", build.compile)
        made_again = f"built for this CPU, again: {loaded.repaired}"
        return NativeLibrary(loaded.functions, made_again if loaded.repaired else "built for this CPU")
    except (NotBuilt, OSError) as error:
        return NativeLibrary(None, f"not built: {error}")


def missing() -> str | None:
    """Return the reason why compiled ops can't run on this machine; return None if they can."""
    loaded = library()
    if loaded.functions is None:
        return loaded.reason
    return None


def call(name: str, task: ctypes.Structure, threads: int) -> None:
    """Call the compiled function `name` with `task` as its arguments, without the GIL.

    If the function can't allocate its scratch memory, raise MemoryError.
    """
    functions = library().functions
    assert functions is not None, "the library is not built, so this implementation must not be called"
    if getattr(functions, name)(ctypes.byref(task), threads) != 0:
        raise MemoryError(f"{name} found no memory for its scratch space")


@functools.cache
def constant(name: str) -> int:
    """Return a constant from the C++ sources, such as `chunk_tokens`, `token_block` or `attention_piece`."""
    functions = library().functions
    assert functions is not None, "the library is not built, so this implementation must not be called"
    return getattr(functions, name)()


def token_blocks(tokens: int) -> int:
    """Return the number of blocks into which tokens are divided; parameter gradients have a partial sum per block."""
    return -(-tokens // constant("token_block"))


@dataclass(frozen=True)
class Build:
    """Compiler, flags and CPU features for a build, and the digest that is the library's file name."""

    compiler: Path
    flags: tuple[str, ...]
    cpu: str

    @staticmethod
    def here() -> Build:
        """Return the build for this machine; raise NotBuilt if no compiler is found."""
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
        """Compile all sources in parallel and link them into one library; raise NotBuilt if the compiler fails."""
        objects = [target.with_name(f"{source.stem}.o") for source in self.sources]
        with ThreadPoolExecutor(processors()) as pool:
            for _ in pool.map(self._run, [["-c", str(source)] for source in self.sources], objects):
                pass
        self._run([*map(str, objects), "-shared"], target)

    def _run(self, arguments: list[str], target: Path) -> None:
        run_compiler(self.compiler, [*self.flags, *arguments], target)


def cpu_features() -> str:
    """Return the operating system's description of this CPU's features.

    A build's digest depends on this text, because code that was compiled for one CPU can crash on another.
    """
    try:
        with Path("/proc/cpuinfo").open() as file:
            first = "".join(iter(file.readline, "\n"))  # only the first of many cores
        wanted = ("flags", "features", "model", "cpu part", "isa")
        return "".join(line for line in first.splitlines(True) if line.lower().startswith(wanted))
    except OSError:
        return f"{platform.processor()} {platform.release()}"


def threads(worth: float) -> int:
    """Return the number of threads for a call: 1 + `worth`, limited by torch's threads and the cgroup's CPU limit.

    `worth` measures the work. If `worth` is 1, a second thread just begins to save time.
    """
    return max(1, min(torch.get_num_threads(), _allowed(), 1 + int(worth)))


def processors() -> int:
    """Return the number of processors that this process may use at the same time."""
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
    """Return the cgroup folders whose limits apply to a process: its own folder, and all parent folders up to `root`.

    `own` is the text in the process's /proc/self/cgroup. Inside a container, only `root` itself exists.
    """
    below = next((line.removeprefix("0::/") for line in own.splitlines() if line.startswith("0::/")), "")
    folder = root / below
    return [root, *(path for path in (folder, *folder.parents) if root in path.parents and ".." not in path.parts)]


def quota(root: Path) -> int:
    """Return the number of processors that a cgroup folder allows, rounded up; sys.maxsize if there is no limit."""
    try:
        if (root / "cpu.max").exists():
            limit, period = (root / "cpu.max").read_text().split()
        else:
            limit = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        if int(limit) > 0:
            return math.ceil(int(limit) / int(period))
        return sys.maxsize
    except (OSError, ValueError):  # there is no such file, or its text is "max", which means no limit
        return sys.maxsize
