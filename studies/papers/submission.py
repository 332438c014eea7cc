"""A script that tests claims on a SLURM cluster, from the download to the third column of their pages.

It prepares text and weights, queues the sweeps as array jobs with one H100 for each run, and after them the commands
that fill the columns.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtron.problems import Unusable
from hybridtron.sweep.grid import SweepRun, read
from studies.papers.claim import Claim, OnGpu
from studies.papers.material import MATERIAL, needed
from studies.papers.on_gpu import RUNS, SWEEPS, hours, read_runs, runs_of
from studies.results import ROOT

HEAD = """\
set -euo pipefail
CLUSTER=${CLUSTER:-h100_infiniband}  # a file of configs/cluster: docs/slurm.md says how to write yours
# ON='srun --cpus-per-task=32' WORKERS=32 prepares text on a node; by default it is prepared here, by 8 processes

# 1. Text and weights, where they are not there yet"""
TRAINING = "# 2. Training, as array jobs that requeue themselves; 3. behind them, what reads the runs"
TIMING = """
# Speed, of weights as they start: each command times its models on one GPU
ON_GPU=${ON_GPU:-srun --gpus=1 --time=1:00:00}"""


@dataclass(frozen=True)
class Queued:
    """A sweep in the queue: its runs, the names that select them (none: all), further settings, and the commands after
    it.
    """

    sweep: str
    runs: Sequence[SweepRun]
    only: Sequence[str]
    settings: Sequence[str]
    then: Sequence[str]


def script(claims: Sequence[Claim], full: bool, whole: bool) -> str:
    """Return the script for these claims.

    With `full` runs have the paper's size; with `whole` and `full` it queues all runs of the paper's sweeps. Raises
    Unusable if no claim can be tested on a GPU.
    """
    shown = [claim for claim in claims if claim.on_gpu is not None]
    timed = [claim for claim in claims if claim.timed]
    if not shown and not timed:
        raise Unusable(
            f"no run on a GPU shows {', '.join(claim.name for claim in claims)}: its page says what does",
            code="unavailable",
        )
    queued = [_of(sweep, of, full, whole) for sweep, of in by_sweep(shown).items()]
    if full and whole:
        queued += _others([item.sweep for item in queued])
    lines = ["#!/bin/bash", f"# {', '.join(claim.name for claim in (*shown, *timed))}"]
    if queued:
        lines += [*_about(shown, queued, full), HEAD, *_made(queued, full), "", TRAINING]
        lines += [line for item in queued for line in _lines(item, RUNS[full])]
    if timed:
        lines += [TIMING, *(f"$ON_GPU python -m studies.papers --fill {claim.name}" for claim in timed)]
    return "\n".join(lines) + "\n"


def by_sweep(claims: Sequence[Claim]) -> dict[str, list[tuple[Claim, OnGpu]]]:
    groups: dict[str, list[tuple[Claim, OnGpu]]] = {}
    for claim in claims:
        if claim.on_gpu is not None:
            groups.setdefault(claim.on_gpu.sweep, []).append((claim, claim.on_gpu))
    return groups


def _of(sweep: str, claims: Sequence[tuple[Claim, OnGpu]], full: bool, whole: bool) -> Queued:
    """Merge the needs of several claims on one sweep, so that each run is trained once."""
    then = [line for claim, on_gpu in claims for line in _reading(claim, on_gpu, full)]
    if full and whole:
        return Queued(sweep, read(SWEEPS / f"{sweep}.yaml").runs, (), (), then)
    runs = {run.name: run for _, on_gpu in claims for run in runs_of(on_gpu, full)}
    only = dict.fromkeys(name for _, on_gpu in claims for name in on_gpu.only)
    settings = () if full else claims[0][1].smaller
    return Queued(sweep, list(runs.values()), list(only), settings, then)


def _others(known: Sequence[str]) -> Iterator[Queued]:
    """Yield the paper's sweeps that no claim names."""
    for path in sorted((SWEEPS / Path(known[0]).parent).glob("*.yaml")):
        sweep = path.relative_to(SWEEPS).with_suffix("").as_posix()
        if sweep not in known:
            yield Queued(sweep, read(path).runs, (), (), ())


def _about(claims: Sequence[Claim], queued: Sequence[Queued], full: bool) -> Iterator[str]:
    count = sum(len(item.runs) for item in queued)
    if full:
        yield f"# {count} runs of the paper's size, one H100 each. Written by python -m studies.papers --submit --full"
        return
    spent: dict[tuple[str, str], float] = {}
    for claim in claims:
        if claim.on_gpu is not None:
            spent |= {(claim.on_gpu.sweep, name): took for name, took in hours(claim.on_gpu).items()}
    together = f"{sum(spent.values()):.1f} hours together expected"
    yield f"# {count} runs of one H100 each, {together}: modelled"
    yield "# Written by python -m studies.papers --submit"


def _made(queued: Sequence[Queued], full: bool) -> Iterator[str]:
    """Yield commands that make each missing path."""
    for path in needed(run for item in queued for run in item.runs):
        material = MATERIAL[path]
        yield f"if [ ! -e {path} ]; then"
        quoted = False  # lines of a document that a command reads are not indented
        for line in material.lines:
            yield line if quoted else f"  {line.replace('{files}', material.files[full])}"
            quoted = (quoted or "<<'END'" in line) and line != "END"
        yield "fi"


def _lines(one: Queued, output: str) -> Iterator[str]:
    file = SWEEPS / f"{one.sweep}.yaml"
    words = ["hybridtron", "sweep", str(file.relative_to(ROOT)), "--output", f"{output}/{one.sweep}"]
    words += [word for name in one.only for word in ("--only", name)]
    then = f" --then {shlex.quote(' && '.join(dict.fromkeys(one.then)))}" if one.then else ""
    yield from ("", f"{shlex.join([*words, *one.settings])} \\", f'  --slurm cluster="$CLUSTER"{then}')


def _reading(claim: Claim, on_gpu: OnGpu, full: bool) -> Iterator[str]:
    """Yield the commands that read a claim's runs."""
    if on_gpu.column is not None:
        yield f"python -m studies.papers --fill {claim.name}{' --full' if full else ''}"
        return
    for run in read_runs(on_gpu):
        yield f"hybridtron evaluate {shlex.quote(f'{RUNS[full]}/{on_gpu.sweep}/{run.name}')} {on_gpu.reads}"
