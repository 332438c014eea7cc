"""A training run as a cluster sees it: processes that are started again and again until training has finished.

The model is a Samba (Mamba and sliding-window attention) with about ten thousand weights, and in the layout `ep2` with
experts instead of MLPs. The text is synthetic. A step takes a fraction of a second. With `states.mode=passing`,
sequences start from the final recurrent states of earlier sequences. Checkpoints therefore contain states too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtron.planning.checkpoint_interval import best_interval
from hybridtron.resources import PACKAGE
from hybridtron.train.jsonl import read_record

TRAIN = ("-P", "-m", "hybridtron", "train")  # -P: ignore modules in the current folder
PROC = Path("/proc")
EXPERTS = "{kind: moe, experts: 8, top_k: 2, scores: sigmoid, balance: bias, speed: 0.01}"
LAYOUTS = {
    "dp2": (),
    "tp2": ("parallel.tensor=2",),
    "pp2": ("parallel.pipeline=2",),
    "ep2": ("parallel.expert=2", f"model.layers.-={EXPERTS}"),
}
PROCESSES = 2
VOCAB = 64
SEQ_LEN = 32
ROWS = 8  # sequences in a step
FAULT_EVERY = 20  # steps between two faults on average, if the command line gives no other number
SAVE_STEPS = 0.25  # time for which a checkpoint stops training, in steps: 0.10 s of 0.40 s, in an undisturbed run
SAVE_EVERY = round(best_interval(SAVE_STEPS, FAULT_EVERY))  # steps
TIMEOUT_S = 20.0  # run.timeout; long enough for the first step, which starts data workers
TOGETHER_S = 5.0  # time for the remaining processes to end after one process has failed
START_S = 180.0  # time limit from a start to its first training step


@dataclass(frozen=True)
class Run:
    """A run in its own folder `home`.

    Processes work in `home`, and `run.dir` is the relative path `run`. Two runs in different folders can therefore have
    equal settings.
    """

    home: Path
    arguments: tuple[str, ...]
    steps: int

    @property
    def folder(self) -> Path:
        return self.home / "run"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def lines(self) -> list[str]:
        """Return the complete lines in metrics.jsonl, one for each step."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            return path.read_text().split("\n")[:-1]
        return []

    def start(
        self,
        log: str,
        command: Sequence[str],
        variables: Mapping[str, object],
        *,
        own_group: bool,
        before: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a Python process that trains the run.

        `command` has Python's arguments before the run's settings, and `variables` has further environment variables.
        The output is appended to the file `log`. With `own_group` the process leads its own process group, so that the
        process can be killed together with all its data workers. `before` has the words of a command that starts
        Python.
        """
        shared = {"OMP_NUM_THREADS": 1, "PYTHONPATH": PACKAGE.parent, "CUDA_VISIBLE_DEVICES": "", **variables}
        environment = os.environ | {name: str(value) for name, value in shared.items()}
        command_line = [*before, sys.executable, *command, *self.arguments]
        with (self.home / log).open("ab") as file:
            return subprocess.Popen(
                command_line, cwd=self.home, env=environment, stdout=file, stderr=file, start_new_session=own_group
            )

    def outcome(self) -> dict[str, Any]:
        """Return the contents of outcome.json, or {} if the run was killed."""
        return read_record(self.folder / "outcome.json")


def arguments_of(data: Path, steps: int, layout: str) -> tuple[str, ...]:
    """Return the run's settings as key=value arguments."""
    return (
        "recipe=laptop", "run.dir=run", f"run.timeout={TIMEOUT_S:g}", "run.eval_every=1000000",
        "run.eval_tokens=512", "run.eval_lengths=[1]", "run.sample_tokens=0", *LAYOUTS[layout],
        "data=folder", f"data.path={data}", "data.epochs=null", "data.workers=1", f"model.vocab_size={VOCAB}",
        "model.width=32",
        "model.layers.M.state=4", "model.layers.W.window=16", "model.layers.-.hidden=64", "states.mode=passing",
        f"phases.0.seq_len={SEQ_LEN}", f"phases.0.global_batch={ROWS}", "phases.0.micro_batch=2",
        f"phases.0.tokens={steps * SEQ_LEN * ROWS}", f"checkpoint.every={SAVE_EVERY}", "checkpoint.keep=3",
        "checkpoint.async=true", "checkpoint.failures=1000",
    )  # fmt: skip


def write_data(path: Path) -> None:
    """Write a prepared folder with synthetic documents.

    In a document, each token exceeds the previous token by 1, 2 or 3, modulo VOCAB - 1. This distance is the same in
    the whole document. About one token in eight is then replaced by a random token.
    """
    import numpy as np
    from tokenizers import Tokenizer, models

    from hybridtron.data.prepare.writer import write_folder

    random = np.random.default_rng(0)
    end = VOCAB - 1

    def documents(count: int) -> Iterator[np.ndarray]:
        for length in random.integers(20, 200, count):
            counted = (random.integers(end) + random.integers(1, 4) * np.arange(length)) % end
            yield np.where(random.random(length) < 1 / 8, random.integers(end, size=length), counted)

    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0")).to_str()
    splits = {"train": {"text": documents(600)}, "validation": {"text": documents(60)}}
    write_folder(path, splits, tokenizer, VOCAB, end, {"corpus": "counting in strides"})


class ProcessStart:
    """One start of a run: a process for each rank, with the environment variables that torchrun would set.

    `before` has the metrics lines from earlier starts.
    """

    def __init__(self, run: Run) -> None:
        from hybridtron.parallel.rendezvous import Rendezvous  # imports torch, which --help does not need

        self.run, self.began = run, time.monotonic()
        self.before = run.lines()
        self.rendezvous = Rendezvous()  # must exist as long as the ranks run
        shared = {"WORLD_SIZE": PROCESSES, **self.rendezvous.variables}
        by_rank = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(PROCESSES)]
        self.ranks = [
            run.start(f"rank-{rank}.log", TRAIN, variables, own_group=True) for rank, variables in enumerate(by_rank)
        ]

    @property
    def codes(self) -> list[int]:
        """Exit codes of the processes that have ended."""
        return [code for rank in self.ranks if (code := rank.poll()) is not None]

    def new_lines(self) -> list[str]:
        """Return the metrics lines that this start has written.

        If a start repeats steps from earlier starts, it replaces these steps' lines. A step's old and new line have
        different times. The new lines therefore begin at the first line that differs from `before`. If no line differs,
        they begin after the last line in `before`.
        """
        now = self.run.lines()
        first_changed = next((n for n, (a, b) in enumerate(zip(self.before, now, strict=False)) if a != b), None)
        return now[min(len(self.before), len(now)) if first_changed is None else first_changed :]

    def workers(self) -> list[int]:
        """Return the data workers' process ids; the workers are children of each rank's fork server."""
        return [worker for rank in self.ranks for server in children(rank.pid) for worker in children(server)]

    def kill(self) -> None:
        """Kill the processes of all ranks and their data workers, including stopped processes."""
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def children(process: int) -> Sequence[int]:
    """Return the ids of a process's child processes, or an empty list if the system does not report them."""
    with suppress(OSError):
        return [int(child) for child in (PROC / f"{process}/task/{process}/children").read_text().split()]
    return []
