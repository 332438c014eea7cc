"""A training run as a cluster sees it: processes that are started again and again until training has finished.

The model is a Samba of about ten thousand weights that carries its states, and the text is synthetic, so that a step
takes a fraction of a second. Everything else is as in a real run.
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

from hybridtron.shipped import PACKAGE
from hybridtron.train.records import read_record

TRAIN = ("-P", "-m", "hybridtron", "train")  # -P: ignore modules in the current folder
PROC = Path("/proc")
LAYOUTS = {"dp2": (), "tp2": ("parallel.tensor=2",), "pp2": ("parallel.pipeline=2",)}
PROCESSES = 2
VOCAB = 64
SEQ_LEN = 32
ROWS = 8
SAVE_EVERY = 7  # steps
TIMEOUT_S = 20.0  # run.timeout; a first step starts worker processes, which takes seconds
TOGETHER_S = 5.0  # time for the other processes to end after one has failed
START_S = 180.0  # time limit up to the first step


@dataclass(frozen=True)
class Run:
    """A run in its own folder. It trains in home/run, so that two runs can have exactly the same settings."""

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
        """Return the complete lines of the run's metrics."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            return path.read_text().split("\n")[:-1]
        return []

    def start(
        self, log: str, command: Sequence[str], variables: Mapping[str, object], own_group: bool
    ) -> subprocess.Popen[bytes]:
        """Start a process that trains the run; with `own_group` it can be killed together with all its workers."""
        shared = {"OMP_NUM_THREADS": 1, "PYTHONPATH": PACKAGE.parent, "CUDA_VISIBLE_DEVICES": "", **variables}
        environment = os.environ | {name: str(value) for name, value in shared.items()}
        words = [sys.executable, *command, *self.arguments]
        with (self.home / log).open("ab") as file:
            return subprocess.Popen(
                words, cwd=self.home, env=environment, stdout=file, stderr=file, start_new_session=own_group
            )

    def outcome(self) -> dict[str, Any]:
        """Return the run's outcome.json, or {} if it was killed."""
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
    """Write prepared tokens: documents that count up in strides, with one token in eight at random."""
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
    """Processes of one start, with the environment that torchrun would set."""

    def __init__(self, run: Run) -> None:
        from hybridtron.parallel.rendezvous import Rendezvous  # imports torch, which --help does not need

        self.run, self.began = run, time.monotonic()
        self.before = run.lines()
        self.rendezvous = Rendezvous()  # must live as long as its ranks
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
        """Return the metrics lines of the steps done since this start."""
        now = self.run.lines()
        first_changed = next((n for n, (a, b) in enumerate(zip(self.before, now, strict=False)) if a != b), None)
        return now[min(len(self.before), len(now)) if first_changed is None else first_changed :]

    def workers(self) -> list[int]:
        """Return the process ids of the ranks' data workers, which are children of each rank's fork server."""
        return [worker for rank in self.ranks for server in children(rank.pid) for worker in children(server)]

    def kill(self) -> None:
        """Kill all processes of the start, in any state."""
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def children(process: int) -> Sequence[int]:
    """Return a process's children; an empty list if the system does not report them."""
    with suppress(OSError):
        return [int(child) for child in (PROC / f"{process}/task/{process}/children").read_text().split()]
    return []
