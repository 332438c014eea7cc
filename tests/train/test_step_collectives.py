"""The collectives of a training step: none of them is a message between hosts, which a GPU's step would wait for."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hybridtron.cli import train
from hybridtron.data.folder import TokenFolder
from hybridtron.parallel.pool import Seat
from hybridtron.parallel.rendezvous import Rendezvous
from hybridtron.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.train.conftest import small_run_arguments

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
RECORDED = ("all_gather", "all_gather_into_tensor", "all_reduce", "barrier", "broadcast", "reduce_scatter_tensor")
LAYOUTS = {
    "dp2": ["parallel.distributed_optimizer=true"],
    "dp2-plain": ["parallel.distributed_optimizer=false"],
    "tp2": ["parallel.tensor=2"],
    "checked": ["run.verify_state=2", "run.verify_every=2", "run.deterministic=true"],
}


Steps = dict[int, Counter[tuple[str, str]]]
"""Collectives by step, each with the name of its group: `all ranks`, `control`, or `computing` for others."""


def calls_of_steps(seat: Seat, place: dict[str, str], arguments: list[str]) -> tuple[Steps, Counter[str]]:
    """Train; count each step's collectives, and the files whose digest or size this process compares."""
    os.environ.update(place, RANK=str(seat.rank), WORLD_SIZE=str(seat.world_size))
    steps: dict[int, Counter[tuple[str, str]]] = {}
    current: Counter[tuple[str, str]] = Counter()
    names: dict[Any, str] = {}

    def counted(name: str) -> None:
        original = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            group = next((each for each in arguments if isinstance(each, dist.ProcessGroup)), options.get("group"))
            current[name, "all ranks" if group is None else names.get(group, "computing")] += 1
            return original(*arguments, **options)

        setattr(dist, name, call)

    compared: Counter[str] = Counter()

    def compares(name: str) -> None:
        original = getattr(TokenFolder, name)

        def call(self: TokenFolder, *arguments: str) -> Any:
            compared[arguments[0] if arguments else "sizes"] += 1
            return original(self, *arguments)

        setattr(TokenFolder, name, call)

    for name in RECORDED:
        counted(name)
    for name in ("_check_sizes", "verified"):
        compares(name)
    train_step = Trainer.train_step

    def noted(self: Trainer, step: int, *rest: Any) -> Any:
        nonlocal current
        control = getattr(self.groups, "control", None)
        if control is not None:
            names.update(dict.fromkeys((control.ranks_of_node, control.leaders), "control"))
        current = steps.setdefault(step, Counter())
        return train_step(self, step, *rest)

    Trainer.train_step = noted
    assert train.main(arguments) == 0
    return steps, compared


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "dp2")]
)
def test_steps_send_nothing_between_hosts_and_a_node_checks_data_once(
    layout: str, counting_folder: Path, tmp_path: Path
) -> None:
    """Steps 2 to 4 neither evaluate nor save, and the save after step 5 shows that the count sees messages."""
    arguments = [*small_run_arguments(counting_folder, tmp_path / "run"), "run.max_steps=6", *LAYOUTS[layout]]
    rendezvous = Rendezvous()
    results = run_distributed(calls_of_steps, 2, rendezvous.variables, arguments, timeout_s=100)
    for steps, _ in results:
        for step in (2, 3, 4):
            assert {group for _, group in steps[step]} == {"computing"}, steps[step]
        assert any(group == "control" for _, group in steps[5])  # the checkpoint's report, so that the test sees any
    (_, first), (_, second) = results
    assert second == {"sizes": 1, "tokenizer.json": 1}, (first, second)  # before the ranks join, each looks once
    assert first["sizes"] > 1
    assert first["train/text/lengths.npy"] >= 1
