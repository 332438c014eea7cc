"""Ranks of a run on the pool's processes, one of which something happens to in the middle of training."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hybridtron.cli import train
from hybridtron.data.batch import Batch
from hybridtron.data.loader import Loader, _Rows
from hybridtron.engine import schedule
from hybridtron.engine.engine import Engine
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.loss import chunked
from hybridtron.ops.softmax import SoftmaxSums, SoftmaxSumsInputs
from hybridtron.parallel.linear import TensorGroup
from hybridtron.parallel.pool import Seat
from hybridtron.parallel.rendezvous import Rendezvous
from tests.distributed import run_distributed


def out_of_luck() -> None:
    raise RuntimeError("out of luck")


def signalled(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def keep_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(600)  # PyDLL holds on to the interpreter's lock


FAULTS: dict[str, Callable[[], None]] = {
    "raise": out_of_luck,
    "sleep": lambda: time.sleep(600),
    "kill": signalled(signal.SIGKILL),
    "stop": signalled(signal.SIGSTOP),
    "lock": keep_the_interpreter,
    **{name: signalled(signal.Signals[name]) for name in ("SIGTERM", "SIGINT", "SIGUSR1")},
}


@contextmanager
def happening(fault: str, owner: type, method: str, call: int) -> Iterator[None]:
    """The fault comes just before the so-manieth call of a method, counted from 1."""
    original = getattr(owner, method)
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            FAULTS[fault]()
        return original(*arguments)

    setattr(owner, method, counted)
    try:
        yield
    finally:
        setattr(owner, method, original)


@dataclass
class Faulty(Dataset[Any]):
    """A worker process's dataset, with a fault before it reads a step, counted from 1.

    From then on its stderr goes to a file.
    """

    read: Dataset[Any]
    fault: str
    step: int
    stderr: Path

    def __getitem__(self, step: int) -> Any:
        if step + 1 == self.step:
            with self.stderr.open("wb") as file:
                os.dup2(file.fileno(), 2)
            FAULTS[self.fault]()
        return self.read[step]


@contextmanager
def happening_to_a_worker(fault: str, step: int, stderr: Path) -> Iterator[None]:
    """Read with a worker process, for any value of data.workers, and let the fault happen there."""
    original = Loader._read_ahead

    def read_ahead(loader: Loader, steps: range) -> Iterator[Any]:
        loader.ahead = replace(loader.ahead, workers=1)
        loader._rows = Faulty(loader._rows, fault, step, stderr)
        return original(loader, steps)

    Loader._read_ahead = read_ahead
    try:
        yield
    finally:
        Loader._read_ahead = original


def _off(
    sums: Callable[[SoftmaxSumsInputs], SoftmaxSums], value: float, token: int, inputs: SoftmaxSumsInputs
) -> SoftmaxSums:
    logits_CV, labels_C = inputs
    logits_CV[token, labels_C[token] % logits_CV.shape[1]] += value
    return sums(inputs)


@contextmanager
def spoiled(value: float, calls: Collection[int]) -> Iterator[None]:
    """A logit of these micro-batches, counted from 1 over all that this process trains on, is off by this value.

    It is that of the token that comes next (of some token, where this rank holds a share of the vocabulary): -inf makes
    the loss infinite and leaves the gradients finite.
    """
    original = schedule._loss_of
    seen = []

    def loss_of(
        x_LBD: Tensor, model: LanguageModel, batch: Batch, chunks: int, z_loss: float, tensor: TensorGroup
    ) -> Any:
        seen.extend([1] * torch.is_grad_enabled())
        if not torch.is_grad_enabled() or len(seen) not in calls:
            return original(x_LBD, model, batch, chunks, z_loss, tensor)
        token = int(batch.mask_BL.T.flatten().nonzero()[0])  # one that counts
        with patch.object(chunked, "softmax_sums", partial(_off, chunked.softmax_sums, value, token)):
            return original(x_LBD, model, batch, chunks, z_loss, tensor)

    schedule._loss_of = loss_of
    try:
        yield
    finally:
        schedule._loss_of = original


def train_rank(
    seat: Seat, place: dict[str, str], arguments: list[str], fault: str | None, at: str, rank: int, step: int
) -> int:
    """train.py's main as one rank that a launcher has started; the fault comes to one rank, in its step or loader,
    or in the worker process that its loader reads with.

    Or to the loss of two steps, which is then off by the number that the fault is.
    """
    os.environ.update(place, RANK=str(seat.rank), WORLD_SIZE=str(seat.world_size))
    multiprocessing.current_process()._config["daemon"] = False  # unlike a process of the pool, a rank has children
    if fault is None or seat.rank != rank:
        return train.main(arguments)
    if at == "loss":
        with spoiled(float(fault), range(step, step + 2)):
            return train.main(arguments)
    if at == "worker":
        run = next(one.removeprefix("run.dir=") for one in arguments if one.startswith("run.dir="))
        with happening_to_a_worker(fault, step, Path(run) / "logs" / "worker.txt"):
            return train.main(arguments)
    owner, method = {"step": (Engine, "forward_backward"), "loader": (_Rows, "__getitem__")}[at]
    with happening(fault, owner, method, step):
        return train.main(arguments)


def train_ranks(
    arguments: list[str], fault: str | None = None, at: str = "step", rank: int = 1, step: int = 8
) -> list[int]:
    """Exit codes of two ranks; raises WorkerError if one of them raises or dies."""
    rendezvous = Rendezvous()
    return run_distributed(train_rank, 2, rendezvous.variables, arguments, fault, at, rank, step, timeout_s=200)


def outcome_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "outcome.json").read_text())


def ending_of(run: Path) -> dict[str, Any]:
    """Return a run's outcome without its progress."""
    return {key: value for key, value in outcome_of(run).items() if key in ("outcome", "step", "rank", "reason")}


def trained(run: Path) -> list[dict[str, Any]]:
    """The metrics that the same training gives again."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line.get(key) for key in ("step", "tokens", "loss", "grad_norm", "validation")} for line in lines]
