"""Profiles a step: a table of times by kernel, and the fraction of time in which the device is idle.

Triton names a kernel by its function alone, and several ops have a `_backward`. Launches of one stream run in the order
in which they are made, so the n-th event of a name belongs to the n-th launch of a function with that name, and each
launch is recorded with its op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hybridtron.device import compute_device, synchronize
from hybridtron.ops.kernel_launch import kernel_name, noted_launches

SHOWN = 40
GAP_US = 20.0


class DeviceSpan(NamedTuple):
    """One kernel or copy on the device, in microseconds."""

    name: str
    start: float
    end: float


class Launched(NamedTuple):
    """One launch of our kernels: the function's name, and the name with its op."""

    function: str
    name: str


def profiled(step: Any) -> tuple[list[DeviceSpan], list[Launched]]:
    """Profile one call of a step that has run before; return the device's spans, and our launches in order."""
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


def labelled(spans: Sequence[DeviceSpan], launches: Sequence[Launched]) -> list[DeviceSpan]:
    """Return spans sorted by time, with op names for our kernels if as many ran as were launched."""
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
    """Return calls and milliseconds by kernel, the longest first, with the model's milliseconds per step."""
    calls: dict[str, int] = defaultdict(int)
    busy: dict[str, float] = defaultdict(float)
    for span in spans:
        calls[span.name] += 1
        busy[span.name] += (span.end - span.start) / 1e3
    longest = sorted(busy, key=lambda name: -busy[name])[:SHOWN]
    return [
        {"kernel": name[:120], "calls": calls[name], "ms": round(busy[name], 4), "model_ms": modelled.get(name)}
        for name in longest
    ]


def model_ms(kernels: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return a step's milliseconds by kernel, from a rehearsal's list of different launches."""
    milliseconds: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        milliseconds[kernel["name"]] += 1e3 * kernel["seconds"] * kernel["launches"]
    return {name: round(ms, 4) for name, ms in milliseconds.items()}


def idle(spans: Sequence[DeviceSpan]) -> dict[str, float]:
    """Return the busy time and the idle share between the first kernel's start and the last kernel's end."""
    busy = 0.0
    gaps = 0
    until = 0.0
    ordered = sorted(spans, key=lambda span: span.start)
    for number, span in enumerate(ordered):
        gaps += number > 0 and span.start - until > GAP_US
        busy += max(0.0, span.end - max(span.start, until)) if number else span.end - span.start
        until = max(until, span.end)
    whole = until - ordered[0].start if ordered else 0.0
    share = 1 - busy / whole if whole else 0.0
    return {"kernels": len(ordered), "busy_ms": busy / 1e3, "idle_share": share, "gaps over 20 us": gaps}
