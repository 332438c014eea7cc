"""Profiles of the steps in `run.profile`, and the process's peak memory.

For each profiled step, every rank writes a Chrome trace, and a table of the operations that allocated most memory. On
CUDA every rank also writes a snapshot for torch's memory viewer.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from hybridtron.device import compute_device, dump_memory_snapshot, peak_memory_gib, record_memory_history


@contextmanager
def profile_if_chosen(step: int, chosen: Sequence[int], logs: Path, rank: int) -> Iterator[None]:
    """Profile the block if `step` is one of the steps in `chosen`, and write the files to the folder `logs`."""
    if step not in chosen:
        yield
        return
    on_cuda = compute_device().type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    if on_cuda:
        record_memory_history(True)
    with profile(activities=activities, profile_memory=True, acc_events=True) as trace:
        yield
    trace.export_chrome_trace(str(logs / f"trace-step-{step:08d}-rank-{rank}.json"))
    if on_cuda:
        key = "self_cuda_memory_usage"
    else:
        key = "self_cpu_memory_usage"
    (logs / f"memory-step-{step:08d}-rank-{rank}.txt").write_text(trace.key_averages().table(sort_by=key, row_limit=40))
    if on_cuda:
        dump_memory_snapshot(str(logs / f"memory-step-{step:08d}-rank-{rank}.pickle"))
        record_memory_history(False)


def most_memory_gib() -> float:
    """Return this process's peak memory so far in GiB: device memory if the device reports it, else host memory."""
    on_device = peak_memory_gib()
    unit = 2**20 if sys.platform == "linux" else 2**30  # one GiB in ru_maxrss's unit: KiB on Linux, bytes on macOS
    if on_device is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return on_device
