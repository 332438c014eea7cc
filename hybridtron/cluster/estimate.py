"""Estimate of a submission before it is queued: steps, tokens, hours, jobs, and text that is not on this machine.

The estimate covers the whole run, including steps that are already done. Hours are a guess: the run's FLOPs at the MFU
that all tables assume. They leave out the time in the queue, and the time of saves, evaluations and restarts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from hybridtron.cluster import scheduler
from hybridtron.cluster.job import SlurmJob
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.schema import Source
from hybridtron.config.units import readable
from hybridtron.data.folder import FolderError, TokenFolder
from hybridtron.data.mixture_spec import named_sources
from hybridtron.storage.remote import is_url
from hybridtron.train.phase_table import MFU, device_hours, flops


def estimate(plan: RunPlan, job: SlurmJob, chain: int) -> Iterator[str]:
    """Yield lines for the user: the run's size, its hours and jobs, and sources whose folders can't be opened here."""
    nodes = job.fitting[-1]
    devices = nodes * job.cluster.processes
    tokens = sum(read_tokens(phase, plan.last_step) for phase in plan.phases)
    place = f"{_counted(devices, 'device')} of {_counted(nodes, 'node')}"
    yield f"the whole run: {plan.last_step:,} steps, {readable(tokens)} tokens on {place}"
    if job.cluster.peak_tflops is None:
        yield "hours are unknown: set cluster.peak_tflops to the peak rate of a device"
    else:
        yield from _hours(plan, job, devices, chain)
    for phase in plan.phases:
        yield from _absent(phase, read_tokens(phase, plan.last_step))


def read_tokens(phase: ResolvedPhase, last_step: int) -> int:
    """Return the number of tokens that a phase reads in a run up to `last_step`, such as run.max_steps."""
    if last_step >= phase.end_step:
        return phase.tokens
    return phase.phase_tokens_at(max(last_step, phase.start_step))


def _hours(plan: RunPlan, job: SlurmJob, devices: int, chain: int) -> Iterator[str]:
    cluster = job.cluster
    peak = cluster.peak_tflops
    assert peak is not None
    amounts = (flops(phase) * read_tokens(phase, plan.last_step) / phase.tokens for phase in plan.phases)
    gpu_hours = device_hours(sum(amounts), peak)
    hours = gpu_hours / devices
    yield (
        f"about {readable(hours)} hours, {readable(gpu_hours)} GPU-hours, "
        f"at {MFU:.0%} of {peak:g} TFLOP/s (a guess), without saves and restarts"
    )
    limit = scheduler.seconds(cluster.time)
    if limit is None or limit <= cluster.stop_before:
        return  # a problem of `cluster.time`, which `cluster_problems` reports
    jobs = max(1, math.ceil(hours * 3600 / (limit - cluster.stop_before)))
    if cluster.requeue and jobs > 1:
        yield f"a job of {cluster.time} that requeues itself {_counted(jobs - 1, 'time')}"
    elif jobs > chain:
        yield f"{_counted(jobs, 'job')} of {cluster.time}, but {chain} would be queued: use --chain {jobs}"
    else:
        yield f"{_counted(jobs, 'job')} of {cluster.time}"


def _absent(phase: ResolvedPhase, num_tokens: int) -> Iterator[str]:
    """Yield a line for each source whose folder can't be opened here, with its share of `num_tokens` tokens."""
    data = phase.data
    if data.source == Source.embedded or not num_tokens:
        return  # the embedded text is prepared when the phase opens it
    folders = [entry.path or data.path for entry in data.mixture.values()] or [data.path]
    absent = {folder for folder in set(folders) if not is_url(folder) and not _opens(folder)}
    for (name, _, share), folder in zip(named_sources(data), folders, strict=True):
        if folder not in absent:
            continue
        tokens = f"{readable(share * num_tokens)} tokens"
        if name:
            tokens += f" of {name}"
        yield f"not here: {tokens} (phase {phase.settings.name}), from {folder}"


def _opens(place: str) -> bool:
    try:
        TokenFolder.open(Path(place))
    except FolderError:
        return False
    return True


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)
