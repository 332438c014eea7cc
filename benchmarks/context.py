"""A step over one long row: two processes with one thread and half of the row each, against one process with two
threads.

Both forms thus have the same cores. The processes communicate over gloo (`parallel.context=2`). The ratio is the cost
of sequence shards: recurrences that run twice, the exchange of states, and waits, less the loss of two threads in one
process. The goal is for wall-clock time, which is meaningful only on an idle machine. Processor time is summed over
both processes: it shows the repeated work, on a busy machine too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from hybridtron.architecture.table import architecture
from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.parallel.groups import barrier, start
from hybridtron.planning.count import count
from hybridtron.proving.measuring import BenchReport, Seconds, times
from hybridtron.proving.steps import Steps, load_checked, one_process, random_batches
from hybridtron.requirements import hide_known_warnings

RANKS = 2
SHARED = "2 processes"
WHOLE = "1 process, 2 threads"
MODELS = {"Mamba": "(M-W-)*2", "Mamba-2": "(S-W-)*2"}
SIZES = ("model.width=128", "model.layers.-.hidden=320", "model.layers.W.window=512", "model.layers.S={kind: mamba2}")
ROW = ("phases.0.global_batch=1", "phases.0.micro_batch=1", "data.documents=join")
ROW += ("run.eval_lengths=[1]", "run.eval_tokens=1M")
FULL = ("phases.0.seq_len=65536",)
QUICK = ("phases.0.seq_len=128", "model.width=64", "model.vocab_size=320", "model.layers.W.window=16")
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Taken:
    """A step's loss, and its seconds by both clocks."""

    loss: float
    wall: float
    processor: float


@dataclass
class Form:
    """One way to take a step, with the steps taken so far."""

    step: Callable[[], Taken]
    taken: list[Taken] = field(default_factory=list)

    def __call__(self) -> Seconds:
        self.taken.append(self.step())
        return Seconds(self.taken[-1].wall)

    @property
    def processor(self) -> float:
        return min(step.processor for step in self.taken)


def config_of(model: str, quick: bool, *settings: str) -> Config:
    return load_checked(
        ["recipe=laptop", f"model.pattern={MODELS[model]}", *SIZES, *ROW, *(QUICK if quick else FULL), *settings]
    )


def context(report: BenchReport) -> None:
    """Measure both forms of both models in turns, and check that their losses agree."""
    torch.set_num_threads(RANKS)
    configs = {model: config_of(model, report.quick) for model in MODELS}
    with processes(report.quick) as connections, one_process(configs["Mamba"]) as groups:
        forms = {
            model: {
                SHARED: Form(partial(asked, connections, model)),
                WHOLE: Form(partial(taken, Steps(config, groups, random_batches(config)))),
            }
            for model, config in configs.items()
        }
        measured = report.sweep(forms)
    work = [times(compared(model, of_model)) for model, of_model in forms.items()]
    report.ratios("time of a step", "model", measured, [(SHARED, WHOLE)], {"processor time": work})
    for model, timings in measured.items():
        report.at_most(f"{model}, 2 processes that share a row / 1 with 2 threads", 1.15, timings.ratio(SHARED, WHOLE))
    length = configs["Mamba"].phases[0].seq_len
    for model, config in configs.items():
        parameters = readable(count(architecture(config.model), length).parameters)
        report.notes.append(
            f"{model}: pattern {config.model.pattern}, width {config.model.width}, {parameters} parameters"
        )
    report.notes.append(f"one row of {length} tokens, fp32, {report.repetitions} rounds")


def compared(model: str, forms: Mapping[str, Form]) -> float:
    """Return the ratio of the forms' processor times, after a check that their losses agree."""
    shared = forms[SHARED]
    whole = forms[WHOLE]
    apart = max(abs(mine.loss - theirs.loss) for mine, theirs in zip(shared.taken, whole.taken, strict=False))
    assert apart <= LOSS_TOLERANCE, f"the losses of {model} differ by {apart:.1e}"
    return shared.processor / whole.processor


def taken(steps: Steps) -> Taken:
    """Take one step in this process and measure it."""
    wall = time.perf_counter()
    processor = time.process_time()
    steps()
    loss = steps.losses[-1].item()
    return Taken(loss, time.perf_counter() - wall, time.process_time() - processor)


def asked(connections: Sequence[Connection], model: str) -> Taken:
    """Take one step in all processes together.

    Returns the slowest one's wall-clock time, and the processor time of all.
    """
    for connection in connections:
        connection.send(model)
    steps: list[Taken] = [connection.recv() for connection in connections]
    return Taken(steps[0].loss, max(step.wall for step in steps), sum(step.processor for step in steps))


@contextmanager
def processes(quick: bool) -> Iterator[list[Connection]]:
    """Start a process for each sequence shard; it takes a step of a model when it receives the model's name."""
    spawn = get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        started = [
            spawn.Process(target=of_share, args=(theirs, meeting, ProcessLaunch(rank, RANKS), quick), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process, (_, theirs) in zip(started, pipes, strict=True):
                process.start()
                theirs.close()  # so that a process that dies is noticed here
            yield [ours for ours, _ in pipes]
        finally:
            for process in started:
                process.kill()
                process.join()


def of_share(connection: Connection, meeting: str, launch: ProcessLaunch, quick: bool) -> None:
    """Run one process: take a step for each name received, until it is killed."""
    hide_known_warnings()
    torch.set_num_threads(1)
    configs = {model: config_of(model, quick, f"parallel.context={RANKS}") for model in MODELS}
    groups = start(configs["Mamba"].parallel, meeting, launch)
    models = {model: Steps(config, groups, random_batches(config)) for model, config in configs.items()}
    while True:
        model = connection.recv()
        barrier()
        connection.send(taken(models[model]))
