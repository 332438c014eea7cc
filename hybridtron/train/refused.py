"""Batches of refused steps, kept in the run's folder so that `hybridtron replay` can repeat the step.

A refused step is a step whose update was discarded, because its loss or gradients were abnormal. A refused step's files
are:

    refused/phase-0-batch-00000121/            named by the phase's index, and the batch's index in the phase's data
        about.json                             the step, the reason for the refusal, the loss and the gradient norm
        data-00000-context-00000.safetensors   the micro-batches of data-parallel rank 0, with the tokens that
                                               context-parallel rank 0 processed

All tensor-parallel and pipeline-parallel ranks read the same rows (sequences), so only the rank with index 0 in both
groups writes a file. The files are written from memory, because the data on disk may change before the replay. The
folders of the newest `run.keep_refused` refused steps are kept, and older folders are deleted.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.problems import Unusable
from hybridtron.train.hooks import Hook, StepContext
from hybridtron.train.jsonl import read_record
from hybridtron.train.metrics import StepMetrics
from hybridtron.train.outcome import finite
from hybridtron.train.skipped_data import BatchKey

FOLDER = "refused"
ABOUT = "about.json"
OPTIONAL = ("documents", "continues")  # tensors that some batches do not have
LOG = logging.getLogger(__name__)


class RefusedBatches(Hook):
    """Hook that keeps the batches from the newest refused steps. If the disk is full, it logs a warning instead."""

    def on_step(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        keep = context.run.config.run.keep_refused
        why = context.engine.guard.why
        if why is None or not keep:
            return metrics
        assert context.data is not None
        groups = context.run.groups
        folder = folder_of(context.run.run_dir, context.data)
        with warn_of_failure(context.step):
            if groups.is_first:
                about = {"step": context.step, "why": why, "loss": metrics.loss, "norm": metrics.grad_norm}
                make_room(folder, keep)
                (folder / ABOUT).write_text(json.dumps(finite(about)))
        groups.control.barrier()  # reached by all processes, even if the first process could not make the folder
        with warn_of_failure(context.step):
            if groups.tensor.rank == 0 and groups.pipeline.rank == 0:
                name = f"data-{groups.data.rank:05}-context-{groups.context.rank:05}.safetensors"
                (folder / name).write_bytes(save(tensors_of(context.batches)))
        return metrics


@contextmanager
def warn_of_failure(step: int) -> Iterator[None]:
    """Log a warning if the block, which writes a step's batch, raises an OSError."""
    try:
        yield
    except OSError as error:
        LOG.warning("the batch of the refused step %d is not kept: %s", step, error)


def make_room(folder: Path, keep: int) -> None:
    """Make an empty folder for a batch, and remove the oldest folders, so that at most `keep` folders remain.

    The `keep` folders include the new folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for old in kept_batches(folder.parents[1])[: 1 - keep or None]:
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)


@dataclass(frozen=True)
class RefusedBatch:
    """A refused step's batch as read by a single process, with the step and the reason for the refusal."""

    key: BatchKey
    step: int
    why: str
    batches: list[Batch]  # the step's micro-batches


def folder_of(run_dir: Path, key: BatchKey) -> Path:
    """Return the folder for a kept batch."""
    return run_dir / FOLDER / f"phase-{key.phase}-batch-{key.step:08d}"


def key_of(folder: Path) -> BatchKey:
    """Return the key for the batch that a folder holds. Raises Unusable if the folder's name has no such key."""
    if (match := re.fullmatch(r"phase-(\d+)-batch-(\d+)", folder.name)) is None:
        raise Unusable(
            f"{folder} is not a batch of a refused step: name a folder such as phase-0-batch-00000121", code="malformed"
        )
    return BatchKey(int(match[1]), int(match[2]))


def kept_batches(run_dir: Path) -> list[Path]:
    """Return the folders of a run's kept batches, sorted by the refused step."""
    folders = [path.parent for path in (run_dir / FOLDER).glob(f"phase-*/{ABOUT}")]
    return sorted(folders, key=lambda path: (read_record(path / ABOUT).get("step", 0), path.name))


def tensors_of(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Stack the tensors in a step's micro-batches along a new axis 0, and return the stacks by name.

    An optional tensor is left out unless all micro-batches have it.
    """
    stacked = {
        "tokens": torch.stack([batch.tokens_BL for batch in batches]),
        "labels": torch.stack([batch.labels_BL for batch in batches]),
        "mask": torch.stack([batch.mask_BL for batch in batches]),
        "positions": torch.stack([batch.seq.positions_BL for batch in batches]),
    }
    optional = {
        "documents": [batch.seq.documents_BL for batch in batches],
        "continues": [batch.continues_B for batch in batches],
    }
    for name, values in optional.items():
        if (present := [value for value in values if value is not None]) and len(present) == len(values):
            stacked[name] = torch.stack(present)
    return {name: tensor.cpu().contiguous() for name, tensor in stacked.items()}


def read_batch(folder: Path, turns: int) -> RefusedBatch:
    """Read a kept batch for a single process: with full rows, and in the order in which the process trains on them.

    A row position is a sequence's index in the global batch. At each row position a step may read several consecutive
    chunks of one text; `turns` says how many chunks these are. A single process trains on the first chunks of all row
    positions, then on the second chunks, and so on. Raises Unusable if the folder has no complete batch.
    """
    about = read_record(folder / ABOUT)
    files = sorted(folder.glob("data-*.safetensors"))
    if not about or not files:
        fault = "has no complete batch, as the run was killed while it wrote the files: name another folder"
        raise Unusable(f"{folder} {fault}", code="unreadable")
    parts: dict[str, list[Mapping[str, Tensor]]] = {}
    for file in files:
        parts.setdefault(file.name.split("-context-")[0], []).append(load_file(file))
    ranks = [_joined_rows(shards) for shards in parts.values()]
    per_turn = len(ranks[0]["tokens"]) // turns  # number of micro-batches that one data-parallel rank has in each turn
    batches = [
        _batch_of(tensors, turn * per_turn + index)
        for turn in range(turns)
        for tensors in ranks
        for index in range(per_turn)
    ]
    return RefusedBatch(key_of(folder), about["step"], about["why"], batches)


def _joined_rows(shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join one data-parallel rank's sequence shards into full rows (sequences).

    The tensor `continues` has one entry for each row, and is the same in all shards. The other tensors have an entry
    for each token.
    """
    first = shards[0]
    return {
        name: first[name] if name == "continues" else torch.cat([shard[name] for shard in shards], dim=2)
        for name in first
    }


def _batch_of(tensors: Mapping[str, Tensor], number: int) -> Batch:
    optional: dict[str, Any] = {name: tensors[name][number] if name in tensors else None for name in OPTIONAL}
    seq = SeqInfo(tensors["positions"][number], optional["documents"])
    return Batch(
        tensors["tokens"][number],
        tensors["labels"][number],
        tensors["mask"][number],
        seq,
        optional["continues"],
    ).with_boundaries()
