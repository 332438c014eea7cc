"""Runs of train.py that are stopped at a random step and resume: bit for bit on the same layout, alike on another."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridtron.checkpoint.folder import newest
from hybridtron.checkpoint.rewrite import differences
from hybridtron.cli import train
from hybridtron.data.batch import Batch
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from hybridtron.parallel.rendezvous import Rendezvous
from tests.distributed import run_distributed
from tests.train.conftest import small_run_arguments

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
AFTERWARDS = 20
EARLIEST = 3
LATEST = 9
STEPS = LATEST + AFTERWARDS
LAYOUTS = {
    "serial": (1, []),
    "tp2": (2, ["parallel.tensor=2"]),
    "tp2-sp": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "pp2-virtual2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "dp2": (2, []),
    "tp2-pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
}
EXPERT_LAYOUTS = {
    "ep2": (2, ["parallel.expert=2"]),
    "ep4": (4, ["parallel.expert=4", "phases.0.micro_batch=1"]),
    "tp2-ep2-et1": (2, [f"parallel.{key}" for key in ("tensor=2", "sequence=true", "expert=2", "expert_tensor=1")]),
}
MODES = {
    **{mode: [f"phases.0.states.mode={mode}"] for mode in ("zero", "random", "fitted", "passing", "tbtt")},
    "through_time": [f"phases.0.states.{key}" for key in ("mode=tbtt", "chunks=2", "through_time=true")]
    + ["phases.0.global_batch=8", f"phases.0.tokens={128 * STEPS}"],
}
Read = list[list[str]]
"""The rows that were trained on, digested, by step."""


def rank_of_run(seat: Seat, place: dict[str, str], arguments: list[str], stop_at: int | None) -> tuple[int, Read]:
    """train.py's main as one rank that a launcher has started; in the stop_at-th step the last one gets a signal."""
    os.environ.update(place, RANK=str(seat.rank), WORLD_SIZE=str(seat.world_size))
    read: Read = []
    original = Engine.forward_backward

    def noted(self: Engine, batches: list[Batch], step: int) -> Any:
        read.append([hashlib.md5(row.numpy().tobytes()).hexdigest() for batch in batches for row in batch.tokens_BL])
        if len(read) == stop_at and seat.rank == seat.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(self, batches, step)

    Engine.forward_backward = noted
    return train.main(arguments), read


def run(layout: str, arguments: list[str], stop_at: int | None = None, timeout_s: float = 100) -> Read:
    """Train; the rows that all ranks together read in each step."""
    ranks, of_layout = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    rendezvous = Rendezvous()
    answers = run_distributed(
        rank_of_run, ranks, rendezvous.variables, [*arguments, *of_layout], stop_at, timeout_s=timeout_s
    )
    assert {code for code, _ in answers} == {0 if stop_at is None else 75}
    return [
        sorted({row for rows in of_ranks for row in rows}) for of_ranks in zip(*(r for _, r in answers), strict=True)
    ]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


Clean = Callable[[str, str], tuple[Path, Read]]


@pytest.fixture(scope="module")
def clean(counting_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The run of a layout and a mode to which nothing happens."""
    done: dict[tuple[str, str], tuple[Path, Read]] = {}

    def of(layout: str, mode: str) -> tuple[Path, Read]:
        if (layout, mode) not in done:
            folder = tmp_path_factory.mktemp("clean") / "run"
            done[layout, mode] = folder, run(layout, arguments_of(counting_folder, folder, mode))
        return done[layout, mode]

    return of


def arguments_of(data: Path, folder: Path, mode: str) -> list[str]:
    length = [f"phases.0.tokens={64 * STEPS}", "run.eval_every=100", "checkpoint.every=7", "run.eval_lengths=[1]"]
    return [*small_run_arguments(data, folder), *length, *MODES[mode]]


def cases(pairs: list[tuple[str, str]], fast: set[tuple[str, str, str]]) -> list[Any]:
    """Return every mode for a pair of equal layouts, and one mode for any other pair."""
    modes = list(MODES)
    parameters = []
    for number, (first, second) in enumerate(pairs):
        for mode in modes if first == second else [modes[number % len(modes)]]:
            case = (first, second, mode)
            marks = [] if case in fast else [pytest.mark.slow]
            parameters.append(pytest.param(first, second, mode, marks=marks, id="-".join(case)))
    return parameters


SAME = [(layout, layout) for layout in ("serial", "tp2", "pp2", "dp2", "tp2-pp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "_", "mode"), cases(SAME, {("serial", "serial", "tbtt")}))
def test_resume_on_the_same_layout_is_bit_identical(
    layout: str, _: str, mode: str, clean: Clean, counting_folder: Path, tmp_path: Path
) -> None:
    """Weights, optimizer, carried states, random states, losses and data, at the end, after a stop in between."""
    stop = random.Random(f"{layout} {mode}").randint(EARLIEST, STEPS - 1)
    undisturbed, rows = clean(layout, mode)
    arguments = arguments_of(counting_folder, tmp_path / "run", mode)
    assert run(layout, arguments, stop) + run(layout, arguments) == rows
    assert losses(tmp_path / "run") == losses(undisturbed)
    ours = newest(undisturbed)
    theirs = newest(tmp_path / "run")
    assert ours is not None
    assert theirs is not None
    assert ours.meta == theirs.meta
    assert {difference.what for difference in differences(ours, theirs)} == {"config.yaml run.dir"}


PAIRS = [
    ("serial", "tp2"),
    ("tp2", "pp2"),
    ("pp2", "serial"),
    ("dp2", "tp2"),
    ("tp2", "dp2"),
    ("serial", "dp2"),
    ("dp2", "pp2"),
    ("pp2", "dp2"),
    ("tp2-sp", "serial"),
    ("dp2", "tp2-pp2"),
    ("tp2-pp2", "serial"),
    ("tp2-pp2", "dp2"),
    ("pp2-virtual2", "tp2-sp"),
    ("serial", "tp2-pp2"),
]


@pytest.mark.parametrize(("before", "after", "mode"), cases(PAIRS, set()))
def test_resume_on_another_layout_has_close_losses(
    before: str, after: str, mode: str, clean: Clean, counting_folder: Path, tmp_path: Path
) -> None:
    """The order of the data exactly, and the losses of the 20 steps that follow."""
    stop = random.Random(f"{before} {after}").randint(EARLIEST, LATEST)
    undisturbed, rows = clean(before, mode)
    arguments = arguments_of(counting_folder, tmp_path / "run", mode)
    assert run(before, arguments, stop) + run(after, arguments) == rows
    run_losses = losses(tmp_path / "run")
    expected = losses(undisturbed)
    assert run_losses[:stop] == expected[:stop]
    assert run_losses[stop:] == pytest.approx(expected[stop:], rel=1e-5)
