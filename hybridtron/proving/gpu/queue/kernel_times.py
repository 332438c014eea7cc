"""Profiles a step: a table with the time of each kernel, and the fraction of time in which the device is idle.

The profiler names a Triton kernel after its Python function, and several ops have functions with the same name, such as
`_backward`. Therefore each launch of our kernels is recorded with its op. The GPU runs kernels in the order in which
they are launched. The n-th profiled kernel with a function's name thus belongs to the n-th recorded launch with this
name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hybridtron.device import compute_device, synchronize
from hybridtron.ops.kernel_launch import kernel_name, noted_launches

MAX_LISTED = 40  # kernels in the table
GAP_US = 20.0  # microseconds; longer idle times between kernels are counted as gaps


class DeviceSpan(NamedTuple):
    """One kernel or copy on the device, with its start and end in microseconds."""

    name: str
    start: float
    end: float


class Launched(NamedTuple):
    """Launch of one of our kernels: its Python function's name, and the name with the op, such as `scan.walk`."""

    function: str
    name: str


def profile_call(step: Any) -> tuple[list[DeviceSpan], list[Launched]]:
    """Profile one call of a step whose kernels are already compiled.

    Return the kernels and copies on the device, and our kernels' launches in order.
    """
    kind = DeviceType.CUDA if compute_device().type == "cuda" else DeviceType.CPU
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == DeviceType.CUDA else [])]
    launches: list[Launched] = []

    def note(kernel: Any) -> None:
        launches.append(Launched(kernel.__name__, kernel_name(kernel)))

    with noted_launches(note), profile(activities=activities) as trace:
        step()
        synchronize()
    events = (event for event in trace.events() or () if event.device_type == kind and not event.is_user_annotation)
    return [DeviceSpan(event.name, event.time_range.start, event.time_range.end) for event in events], launches


def label_spans(spans: Sequence[DeviceSpan], launches: Sequence[Launched]) -> list[DeviceSpan]:
    """Return spans sorted by start time, with the op added to our kernels' names.

    If a function has more or fewer spans than launches, its spans keep their names.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    waiting: dict[str, list[str]] = defaultdict(list)
    for launch in launches:
        waiting[launch.function].append(launch.name)
    run_counts: dict[str, int] = defaultdict(int)
    for span in ordered:
        run_counts[span.name] += 1
    complete = {name for name, names in waiting.items() if run_counts[name] == len(names)}
    names = {name: iter(waiting[name]) for name in complete}
    return [span._replace(name=next(names[span.name])) if span.name in complete else span for span in ordered]


def by_kernel(spans: Sequence[DeviceSpan], modelled: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return each kernel's call count, total milliseconds and modelled milliseconds, longest total first."""
    calls: dict[str, int] = defaultdict(int)
    busy: dict[str, float] = defaultdict(float)
    for span in spans:
        calls[span.name] += 1
        busy[span.name] += (span.end - span.start) / 1e3
    longest = sorted(busy, key=lambda name: -busy[name])[:MAX_LISTED]
    return [
        {"kernel": name[:120], "calls": calls[name], "ms": round(busy[name], 4), "model_ms": modelled.get(name)}
        for name in longest
    ]


def model_ms(kernels: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return a step's modelled milliseconds by kernel name, from the distinct launches that a rehearsal lists."""
    milliseconds: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        milliseconds[kernel["name"]] += 1e3 * kernel["seconds"] * kernel["launches"]
    return {name: round(ms, 4) for name, ms in milliseconds.items()}


def idle(spans: Sequence[DeviceSpan]) -> dict[str, float]:
    """Return the device's busy time, the idle fraction between first start and last end, and the gap count."""
    busy = 0.0
    gaps = 0
    until = 0.0
    ordered = sorted(spans, key=lambda span: span.start)
    for number, span in enumerate(ordered):
        gaps += number > 0 and span.start - until > GAP_US
        busy += max(0.0, span.end - max(span.start, until)) if number else span.end - span.start
        until = max(until, span.end)
    total_us = until - ordered[0].start if ordered else 0.0
    share = 1 - busy / total_us if total_us else 0.0
    return {"kernels": len(ordered), "busy_ms": busy / 1e3, "idle_share": share, "gaps over 20 us": gaps}
