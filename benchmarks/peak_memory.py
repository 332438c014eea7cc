"""Peak memory of a call: the highest resident set during it, in its own process, minus the memory resident before."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch

from hybridtron.device import peak_memory_gib
from hybridtron.proving.measuring import MIB, BenchReport, times

CACHED_BELOW = 2**16  # bytes; larger blocks are returned to the system when they are freed
Prepared = Callable[..., Callable[[], object]]
"""A module-level function of a form, a length and sizes, which returns the call. It has made the inputs, and has run a
smaller call before, so that libraries loaded by a first call are not counted."""


def fresh_processes() -> ProcessPoolExecutor:
    """Return a pool of two processes at a time, each for one call."""
    return ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1)


def measure_memory(
    report: BenchReport, prepared: Prepared, lengths: Sequence[int], forms: Sequence[str], sizes: object
) -> dict[int, dict[str, int]]:
    """Measure the bytes by length and form, and report them with the first form's ratio to each other form."""
    # Otherwise the C library keeps freed blocks between those in use, and they would count.
    environment = patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_=str(CACHED_BELOW))
    with environment, fresh_processes() as pool:
        waiting = {
            length: {form: pool.submit(added_by, prepared, form, length, sizes) for form in forms} for length in lengths
        }
        peaks = {
            length: {form: measurement.result() for form, measurement in by_form.items()}
            for length, by_form in waiting.items()
        }
    cells = [
        (
            f"{length}",
            *(f"{peak / MIB:,.1f}" for peak in by_form.values()),
            *(times(by_form[forms[0]] / by_form[compared]) for compared in forms[1:]),
        )
        for length, by_form in peaks.items()
    ]
    header = ("tokens", *(f"{form}, MiB" for form in forms), *(f"{forms[0]} / {compared}" for compared in forms[1:]))
    report.table("peak memory", header, cells)
    report.notes.append("peak memory is what a call adds to a fresh process that holds its inputs")
    return peaks


def added_by(prepared: Prepared, form: str, length: int, sizes: object) -> int:
    """Return the bytes that a call adds, on the device, or on the host if the device holds none; runs in its own
    process.
    """
    torch.set_num_threads(1)
    call = prepared(form, length, sizes)
    before = resident(reset=True)
    call()
    on_device = peak_memory_gib()
    if on_device:
        return round(on_device * 2**30)
    return max(resource.getpagesize(), resident(reset=False) - before)


def resident(reset: bool) -> int:
    """Return the highest resident set so far, in bytes; `reset` restarts the count from the current set (Linux
    only).
    """
    status = Path("/proc/self/status")
    if not status.exists():  # macOS counts bytes, and can't be reset
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024
