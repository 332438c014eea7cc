"""One thread and two, by both clocks: single forms, steps of several shapes, many processes at once, and the start of a
run.

Processor time is summed over a form's threads; wall-clock time is the wait for them. On a machine with other work
threads wait for each other, so both clocks are meaningful only on an idle one. Goals are for wall-clock time. Every
round runs every form with one thread and with two, and a form's fastest round counts.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, TypeVar

import torch

from hybridtron.architecture.table import architecture
from hybridtron.config.schema import Config
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.dispatch import force
from hybridtron.ops.registry import torch_alone
from hybridtron.parallel.groups import Groups
from hybridtron.proving.measuring import BenchReport, times
from hybridtron.proving.steps import Steps, load_checked, one_process, random_batches

from . import scan as of_scan
from .llama import LlamaStep
from .step import QUICK

THREADS = (1, 2)
CROWD = 8  # processes at once
ROW = ("phases.0.global_batch=1", "phases.0.micro_batch=1", "run.eval_lengths=[1]", "run.eval_tokens=1M")
LONG = (*ROW, "phases.0.seq_len=16384")
STEP = "step 1/"  # the beginning of the line that reports the first step
IMPORTS = f"import torch, megatron.core; print('{STEP}')"
CLOCKS = ("wall", "processor")
PATIENT_S = 300.0  # longest wait of a process for the slowest one
Key = TypeVar("Key")


@dataclass(frozen=True)
class Clocks:
    """Seconds by each clock; of several rounds the lowest."""

    wall: float
    processor: float


def cores(report: BenchReport) -> None:
    """Run all measurements, one after the other."""
    config = load_checked([*report.recipe, *report.pick(full=(), quick=QUICK)])
    try:
        with one_process(config) as groups:
            threads(report, config, groups)
    finally:
        torch.set_num_threads(1)
    crowd(report)
    begin(report)
    report.notes += [
        f"{config.phases[0].global_batch} rows of {config.phases[0].seq_len} tokens, fp32, {report.repetitions} rounds",
        "both clocks, each form with one thread and with two in every round; of a machine that does anything else the "
        "wall's clock says little",
    ]


def threads(report: BenchReport, config: Config, groups: Groups) -> None:
    """Measure the tables of a single process: two threads over one, and our steps against torch alone."""
    sizes = report.pick(full=of_scan.FULL, quick=of_scan.QUICK)
    length = report.pick(full=4096, quick=64)
    tensors = of_scan.inputs(length, sizes)
    parameters = sum(weight.numel() for weight in LanguageModel(architecture(config.model)).parameters())
    forms = {
        f"selective scan, {length} tokens": partial(of_scan.forward_backward, "native", tensors),
        "a Llama's step": LlamaStep(config, parameters, random_batches(config)),
    }
    shapes = {"laptop recipe's step": (), "1 row": ROW, "1 row of 16,384 tokens": LONG}
    for name, arguments in shapes.items():
        forms |= steps_of(name, groups, [*report.recipe, *arguments, *report.pick(full=(), quick=QUICK)])
    clocks = measured(forms, report.repetitions)
    cells = [(name, *(times(ratio) for ratio in gained(clocks, name))) for name in forms]
    header = ("form", "wall, one thread / two", "processor time, two threads / one")
    report.table("two threads over one", header, cells)
    pairs = {name: (f"{name} by torch alone", name) for name in shapes}
    pairs["a Llama over the laptop recipe"] = ("a Llama's step", "laptop recipe's step")
    cells = [(name, *(times(ratio) for ratio in over(clocks, *pair))) for name, pair in pairs.items()]
    header = ("step", *(f"{clock}, {count} thread{'s' * (count > 1)}" for count in THREADS for clock in CLOCKS))
    report.table("steps by torch alone / ours", header, cells)
    goals(report, clocks, next(iter(forms)), pairs)


def goals(
    report: BenchReport, found: Mapping[tuple[str, int], Clocks], scan: str, pairs: Mapping[str, tuple[str, str]]
) -> None:
    ratios = {name: over(found, *pair) for name, pair in pairs.items()}
    report.at_least("selective scan, one thread / two", 1.8, gained(found, scan)[0])
    report.at_least("laptop recipe's step, torch alone / ours, 2 threads", 2.5, ratios["laptop recipe's step"][2])
    llama = "a Llama over the laptop recipe"
    report.at_least("tokens/s, laptop recipe / Llama, 2 threads", 0.9, ratios.pop(llama)[2])
    report.at_least("every step, torch alone / ours", 1, min(min(found) for found in ratios.values()))


def steps_of(name: str, groups: Groups, arguments: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Return two forms of a step, ours and torch alone, each with its own model."""
    config = load_checked(arguments)
    batches = random_batches(config)
    ours, plain = (Steps(config, groups, batches) for _ in range(2))
    return {name: ours, f"{name} by torch alone": partial(by_torch, plain)}


def by_torch(step: Callable[[], object]) -> None:
    with force(**torch_alone()):
        step()


def measured(forms: Mapping[Key, Callable[[], object]], rounds: int) -> dict[tuple[Key, int], Clocks]:
    """Time all forms in turns.

    The first round, which allocates memory and starts threads, does not count.
    """
    rounds_by_form: dict[tuple[Key, int], list[Clocks]] = {(name, count): [] for name in forms for count in THREADS}
    for _ in range(rounds + 1):
        for (name, count), seconds in rounds_by_form.items():
            torch.set_num_threads(count)
            seconds.append(clocked(forms[name]))
    return {
        key: Clocks(min(once.wall for once in seconds[1:]), min(once.processor for once in seconds[1:]))
        for key, seconds in rounds_by_form.items()
    }


def clocked(run: Callable[[], object]) -> Clocks:
    wall = time.perf_counter()
    processor = time.process_time()
    run()
    return Clocks(time.perf_counter() - wall, time.process_time() - processor)


def gained(found: Mapping[tuple[str, int], Clocks], form: str) -> tuple[float, float]:
    """Return two threads' speed-up by the wall's clock, and their increase in processor time."""
    single, double = (found[form, count] for count in THREADS)
    return single.wall / double.wall, double.processor / single.processor


def over(found: Mapping[tuple[str, int], Clocks], form: str, other: str) -> list[float]:
    """Return one form's time over another's: both clocks with one thread, then with two."""
    pairs = [(found[form, count], found[other, count]) for count in THREADS]
    return [ratio for mine, its in pairs for ratio in (mine.wall / its.wall, mine.processor / its.processor)]


def crowd(report: BenchReport) -> None:
    """Measure the slowest step of many processes at once, with a thread each, as on a larger machine."""
    context = get_context("spawn")
    rounds = report.repetitions
    many = report.pick(full=CROWD, quick=2)
    barrier = context.Barrier(many)
    queue = context.SimpleQueue()
    settings = [*report.recipe, *report.pick(full=(), quick=QUICK)]
    crowd = [context.Process(target=in_the_crowd, args=(settings, rounds, barrier, queue)) for _ in range(many)]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join()
    assert all(process.exitcode == 0 for process in crowd), "a process of the crowd failed"
    ours, plain = zip(*(queue.get() for _ in crowd), strict=True)
    fastest = [min(max(of_round) for of_round in zip(*seconds, strict=True)) for seconds in (ours, plain)]
    ratio = fastest[1] / fastest[0]
    report.table("as many processes at once, a thread each", ("processes", "wall"), [(f"{many}", times(ratio))])
    report.at_least(f"{many} processes at once, torch alone / ours", 1, ratio)


def in_the_crowd(settings: Sequence[str], rounds: int, barrier: Barrier, found: SimpleQueue[Any]) -> None:
    """Run one process of the crowd: time our step and torch's in every round.

    All processes begin each step together; the seconds go into the queue.
    """
    torch.set_num_threads(1)
    config = load_checked(settings)
    with one_process(config) as groups:
        seconds = {form: list[float]() for form in steps_of("ours", groups, settings).items()}
        for _ in range(rounds + 1):
            for (_, step), of_form in seconds.items():
                barrier.wait(PATIENT_S)
                of_form.append(clocked(step).wall)
    found.put([of_form[1:] for of_form in seconds.values()])


def begin(report: BenchReport) -> None:
    """Measure from the command to the end of the first step, with prepared data.

    A run has two steps, as an evaluation would follow the last one.
    """
    imports = ["-W", "ignore", "-c", IMPORTS]
    with tempfile.TemporaryDirectory() as scratch:
        runs = [until_a_step(a_run(number), Path(scratch)) for number in range(report.repetitions + 1)]
        bare = [until_a_step(imports, Path(scratch)) for _ in range(report.repetitions)]
    seconds = {clock: min(getattr(run, clock) for run in runs[1:]) for clock in CLOCKS}  # the first prepares the data
    least = {clock: min(getattr(run, clock) for run in bare) for clock in CLOCKS}
    cells = [times(seconds[clock] / least[clock]) for clock in CLOCKS]
    report.table("from the command to the first step, over importing torch and megatron-core", CLOCKS, [cells])
    report.console.append(f"to the first step: {seconds['wall']:.2f} s, its imports alone {least['wall']:.2f} s")
    report.at_most("seconds from the command to the end of the first step", 4, seconds["wall"])


def a_run(number: int) -> list[str]:
    return ["-m", "hybridtron", "train", f"run.dir={number}", "run.max_steps=2", "run.log_every=1"]


def until_a_step(arguments: Sequence[str], folder: Path) -> Clocks:
    """Run Python until it prints a finished step, and return the time by both clocks."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith(STEP) for line in process.stdout), f"{arguments} ends without a step"
        wall = time.perf_counter() - start
        process.kill()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Clocks(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
