"""Runs with experts that stop and resume: the same bits on the same layout, the same corrections on another one."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import newest
from hybridtron.checkpoint.rewrite import differences
from hybridtron.parallel.pool import Seat, WorkerError
from hybridtron.parallel.rendezvous import Rendezvous
from tests.distributed import run_distributed
from tests.train.conftest import small_run_arguments
from tests.train.test_stop_and_resume import EXPERT_LAYOUTS, losses, rank_of_run, run

pytestmark = [pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(240)]
KILLS = 20
EXPERTS = [
    "model.pattern=MeWx",
    "model.layers.e={kind: moe, experts: 8, top_k: 2, hidden: 16, shared: 16, shared_gate: true, coefficient: 0.01}",
    "model.layers.x={kind: moe, experts: 8, top_k: 2, hidden: 16, activation: squared_relu, scores: sigmoid, groups: 4,"
    " group_limit: 2, balance: bias, speed: 0.01}",
    "run.eval_every=100",
    "optim.eps=1e-4",
]
CORRECTION = "layers.3.mixer.correction"
LAST = 20


def arguments_of(data: Path, folder: Path) -> list[str]:
    return [*(a for a in small_run_arguments(data, folder) if "layers.-" not in a), *EXPERTS]


def saved(folder: Path) -> Checkpoint:
    checkpoint = newest(folder)
    assert checkpoint is not None
    return checkpoint


def moved(before: Tensor) -> Tensor:
    """Return the values that each correction may have after one more step: lower, equal, higher."""
    return torch.stack([before - 0.01, before, before + 0.01])


@pytest.mark.parametrize("layout", ["serial", "ep2", "tp2-ep2-et1"])
def test_resume_on_the_same_layout_is_bit_identical(layout: str, counting_folder: Path, tmp_path: Path) -> None:
    whole = arguments_of(counting_folder, tmp_path / "whole")
    parts = arguments_of(counting_folder, tmp_path / "parts")
    run(layout, whole)
    run(layout, parts, stop_at=8)
    run(layout, parts)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    different = differences(saved(tmp_path / "whole"), saved(tmp_path / "parts"))
    assert {difference.what for difference in different} == {"config.yaml run.dir"}
    assert saved(tmp_path / "whole").whole(CORRECTION).abs().sum() > 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *[("tp2", "pp2"), ("tp2", "serial"), ("dp2", "tp2-sp")],
        *[("ep4", "tp2"), ("ep4", "serial"), ("serial", "ep4"), ("tp2-ep2-et1", "ep2")],
    ],
)
def test_correction_has_the_same_bits_on_another_layout(
    before: str, after: str, counting_folder: Path, tmp_path: Path
) -> None:
    arguments = arguments_of(counting_folder, tmp_path / "run")
    run(before, [*arguments, "run.max_steps=8"])
    at_stop = saved(tmp_path / "run").whole(CORRECTION)
    run(after, [*arguments, "run.max_steps=9"])
    one_later = saved(tmp_path / "run").whole(CORRECTION)
    assert (moved(at_stop) == one_later).any(0).all()
    assert not torch.equal(at_stop, one_later)
    run(after, arguments)
    alone = arguments_of(counting_folder, tmp_path / "alone")
    run("serial", alone)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


def killed_rank(seat: Seat, place: dict[str, str], arguments: list[str], rank: int, calls: int) -> None:
    """Train; this rank is killed before its n-th message to other experts, or the n-th flush or rename of a file."""
    left = calls

    def counting(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counted(*values: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*values, **options)

        setattr(owner, name, counted)

    if seat.rank == rank:
        for owner, name in ((dist, "all_to_all_single"), (os, "fsync"), (os, "rename")):
            counting(owner, name)
    rank_of_run(seat, place, arguments, None)


@pytest.mark.timeout(1500)
def test_twenty_kills_change_no_bit(counting_folder: Path, tmp_path: Path) -> None:
    """A random rank dies at a random moment of a step or a save; the next start resumes from what is on disk."""
    longer = ["phases.0.tokens=2560", "checkpoint.every=1"]  # 40 steps
    whole = [*arguments_of(counting_folder, tmp_path / "whole"), *longer]
    parts = [*arguments_of(counting_folder, tmp_path / "parts"), *longer]
    run("ep2", whole, timeout_s=300)
    draw = random.Random(1)
    steps = []
    ranks, of_layout = EXPERT_LAYOUTS["ep2"]
    for _ in range(KILLS):
        rendezvous = Rendezvous()
        victim = draw.randrange(ranks)
        calls = draw.randrange(15, 45)  # one or two steps
        with pytest.raises(WorkerError, match="died"):
            run_distributed(
                killed_rank, ranks, rendezvous.variables, [*parts, *of_layout], victim, calls, timeout_s=200
            )
        checkpoint = newest(tmp_path / "parts")
        steps.append(0 if checkpoint is None else checkpoint.meta.step)
    assert steps == sorted(steps)
    assert len(set(steps)) > KILLS / 2, f"checkpoints after the kills: {steps}"
    run("ep2", parts, timeout_s=300)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    different = differences(saved(tmp_path / "whole"), saved(tmp_path / "parts"))
    assert {difference.what for difference in different} == {"config.yaml run.dir"}
