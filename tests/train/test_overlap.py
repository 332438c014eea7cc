"""Overlapping traffic with computation changes the time at which weights are gathered, but no result of a run."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import all_of, folder_of
from hybridtron.cli import train
from hybridtron.parallel import mcore
from hybridtron.parallel.pool import Seat
from hybridtron.parallel.rendezvous import Rendezvous
from tests.distributed import run_distributed
from tests.train.conftest import small_run_arguments
from tests.train.faults import trained

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]
IN_TURN = ("parallel.overlap_grad_reduce=false",)  # by itself it overlaps on several data ranks
SIZES = "seq_len: 16, global_batch: 4, micro_batch: 1, lr: 1e-2"
UNSEEN = 2  # a step that is saved, with no evaluation between it and the save
LAYOUTS = {
    "dp2": (2, ()),
    "tp2-dp2": (4, ("parallel.tensor=2",)),
    "pp2-dp2": (4, ("parallel.pipeline=2",)),
    "pp2-vpp2-dp2": (4, ("parallel.pipeline=2", "parallel.virtual_pipeline=2")),
}


def runs_of(seat: Seat, places: list[dict[str, str]], data: Path, folder: Path, settings: tuple[str, ...]) -> None:
    """Three runs as one rank: one that saves with and without an evaluation before, and two that start from the latter.

    One of these resumes it, one takes its weights twice.
    """
    unseen = folder_of(folder / "whole", UNSEEN)
    whole = f"phases=[{{name: a, tokens: 384, export: custom, {SIZES}}}]"
    weights = f"phases=[{{name: b, tokens: 128, {SIZES}}},{{name: c, tokens: 128, init_from: {unseen}, {SIZES}}}]"
    shared = ["precision=bf16", "checkpoint.every=2", "run.eval_every=3", "checkpoint.keep=9", "run.eval_lengths=[1]"]
    shared += ["optim.clip=1e9"]  # the norm's last bits depend on where buckets end
    runs = {
        "whole": [whole],
        "resumed": [whole, f"run.resume={unseen}", "run.max_steps=4"],
        "post_trained": [weights, f"run.weights={unseen}"],
    }
    # many buckets, as a large model has, so that one is gathered while another is used
    mcore.DistributedDataParallelConfig = partial(mcore.DistributedDataParallelConfig, bucket_size=1000)
    os.environ.update(RANK=str(seat.rank), WORLD_SIZE=str(seat.world_size))
    for place, (name, arguments) in zip(places, runs.items(), strict=True):
        os.environ.update(place)
        assert train.main([*small_run_arguments(data, folder / name), *shared, *settings, *arguments]) == 0


def tensors(run: Path) -> dict[tuple[str, str], Tensor]:
    """Everything in every checkpoint of a run."""
    checkpoints = [Checkpoint.open(folder) for folder in all_of(run)]
    return {
        (checkpoint.folder.name, key): checkpoint.whole(key) for checkpoint in checkpoints for key in checkpoint.shapes
    }


def numbers(run: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in ("step", "loss", "validation")} for line in trained(run)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_changes_no_bit_of_checkpoints_and_exports(layout: str, counting_folder: Path, tmp_path: Path) -> None:
    world_size, settings = LAYOUTS[layout]
    plain = tmp_path / "plain"
    overlapped = tmp_path / "overlapped"
    for folder, overlap in ((plain, IN_TURN), (overlapped, ())):
        rendezvous = [Rendezvous() for _ in range(3)]  # their stores must live as long as the runs
        places = [store.variables for store in rendezvous]
        all_settings = (*settings, *overlap)
        run_distributed(runs_of, world_size, places, counting_folder, folder, all_settings, timeout_s=500)
    for name, checkpoints in (("whole", 3), ("resumed", 1), ("post_trained", 2)):
        ours = tensors(overlapped / name)
        theirs = tensors(plain / name)
        assert len({step for step, _ in ours}) == checkpoints
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not ours[key].equal(theirs[key])] == []
        assert numbers(overlapped / name) == numbers(plain / name)
    exports = [(folder / "whole/export/a/model.safetensors").read_bytes() for folder in (plain, overlapped)]
    assert exports[0] == exports[1]
    losses = {name: [line["loss"] for line in trained(overlapped / name)] for name in ("whole", "resumed")}
    assert losses["resumed"] == losses["whole"][UNSEEN : len(losses["resumed"]) + UNSEEN]
