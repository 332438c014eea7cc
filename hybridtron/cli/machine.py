"""Section of `hybridtron doctor` on this machine: cores, memory, disks and limits."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
LEAST_DISK = 10 * GIB
LEAST_SHARED = GIB
LEAST_MEMORY = 4 * GIB
LEAST_FILES = 4096


@dataclass(frozen=True)
class Line:
    """One line of the report. `mark` is ok, warn (training runs, but check this), fail (training can't run) or none."""

    mark: str
    name: str
    found: str
    note: str = ""


def machine_section() -> tuple[str, list[Line]]:
    """Build the section on cores, memory, disks and limits."""
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    lines = [Line("ok", "cores", f"{usable} of {os.cpu_count()}"), _memory_line()]
    lines.append(_disk_line(Path.cwd(), LEAST_DISK, "runs and checkpoints of the present folder"))
    if Path("/dev/shm").exists():
        lines.append(_disk_line(Path("/dev/shm"), LEAST_SHARED, "shared memory of processes and of NCCL"))
    return "machine", [*lines, _temp_line(), _files_line()]


def _memory_line() -> Line:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return _judged(total, LEAST_MEMORY, "memory", f"{total / GIB:.1f} GiB", "what this process may use")


def _disk_line(path: Path, least: int, purpose: str) -> Line:
    free = shutil.disk_usage(path).free
    name = "disk" if path == Path.cwd() else str(path)
    if not os.access(path, os.W_OK):
        return Line("warn", name, "not writable", purpose)
    return _judged(free, least, name, f"{free / GIB:.1f} GiB free", purpose)


def _temp_line() -> Line:
    try:
        with tempfile.TemporaryFile():
            return Line("ok", "temporary files", tempfile.gettempdir())
    except OSError as error:
        return Line("warn", "temporary files", "not writable", f"set TMPDIR to a folder that is: {error}")


def _files_line() -> Line:
    import resource

    files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return Line("ok", "open files", "unlimited")
    return _judged(files, LEAST_FILES, "open files", str(files), f"`ulimit -n {min(hard_limit, 65536)}` raises it")


def _judged(value: int, least: int, name: str, text: str, note: str) -> Line:
    if value >= least:
        return Line("ok", name, text, "" if name == "open files" else note)
    minimum = least if least < GIB else f"{least / GIB:.0f} GiB"
    return Line("warn", name, text, f"less than {minimum}; {note}")
