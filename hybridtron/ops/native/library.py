"""The one owner of compiled code: the C++ beside this file, built where it first runs and kept in the user's cache.

    library()            the functions, or the reason why there are none and the ops run in torch alone
    call("f", task, n)   one of them, on a structure and n threads

A build is named by all that it depends on: sources, compiler, flags and the CPU. So a changed compiler, or another kind
of node on the same home directory, finds no file of its name and makes one; a damaged one is made again
(`hybridtron/compiled.py`).

Not here: what the functions compute (the sources), and which op uses them (`native.py` in the ops' folders).
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
"""Not -ffast-math: it folds the sums that round an exponent, and assumes that nothing is infinite."""


@dataclass(frozen=True)
class NativeLibrary:
    """The functions, or None and why."""

    functions: ctypes.CDLL | None
    reason: str


@functools.cache
def library() -> NativeLibrary:
    """Found or built once for each process; forked children have it from their parent."""
    try:
        build = Build.here()
        loaded = compiled.load("native", f"{build.digest}.so", build.compile)
        made_again = f"built for this CPU, again: {loaded.repaired}"
        return NativeLibrary(loaded.functions, made_again if loaded.repaired else "built for this CPU")
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


@functools.cache
def constant(name: str) -> int:
    """A size that the sources fix: `chunk_tokens` between kept states, `token_block`, `attention_piece`, ..."""
    functions = library().functions
    assert functions is not None, "missing() says whether there is a library"
    return getattr(functions, name)()


def token_blocks(tokens: int) -> int:
    """How many sums over blocks of tokens are made before they are added up."""
    return -(-tokens // constant("token_block"))


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
        """All sources side by side, into one library. Raises NotBuilt."""
        objects = [target.with_name(f"{source.stem}.o") for source in self.sources]
        with ThreadPoolExecutor(processors()) as pool:
            for _ in pool.map(self._run, [["-c", str(source)] for source in self.sources], objects):
                pass
        self._run([*map(str, objects), "-shared"], target)

    def _run(self, arguments: list[str], target: Path) -> None:
        run_compiler(self.compiler, [*self.flags, *arguments], target)


def cpu_features() -> str:
    """What this CPU can compute, in the words of the system: programs built for one kind may end another's process."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            first = "".join(iter(file.readline, "\n"))  # of one core: a node can have hundreds
        wanted = ("flags", "features", "model", "cpu part", "isa")
        return "".join(line for line in first.splitlines(True) if line.lower().startswith(wanted))
    except OSError:
        return f"{platform.processor()} {platform.release()}"


def threads(worth: float) -> int:
    """As many as torch uses (OMP_NUM_THREADS), as the cgroup lets run at once, and as the work is worth."""
    return max(1, min(torch.get_num_threads(), _allowed(), 1 + int(worth)))


def processors() -> int:
    """Count the processors that this process may run on at once."""
    bound = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(bound, _allowed()))


@functools.cache
def _allowed() -> int:
    listing = Path("/proc/self/cgroup")
    return min(map(quota, cgroups(Path("/sys/fs/cgroup"), listing.read_text() if listing.exists() else "")))


def cgroups(root: Path, own: str) -> list[Path]:
    """List the folders whose limits hold for a process, by its /proc/self/cgroup; a container sees the root alone."""
    below = next((line.removeprefix("0::/") for line in own.splitlines() if line.startswith("0::/")), "")
    folder = root / below
    return [root, *(one for one in (folder, *folder.parents) if root in one.parents and ".." not in one.parts)]


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
