"""Batches of refused steps, kept in the run's folder so that `hybridtron replay` can repeat the step.

    refused/phase-0-batch-00000121/            the phase and the data step, as logs/decisions.jsonl has them (`data`)
        about.json                             the step, and why it was refused
        data-00000-context-00000.safetensors   the micro-batches of one data-parallel rank: its part of every row

Ranks with the same rows, of which only one writes, see the same bytes. A folder holds a batch as training had it in
memory, which the data may no longer give. The newest `run.keep_refused` folders are kept.
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
from hybridtron.parallel.groups import barrier
from hybridtron.problems import Unusable
from hybridtron.train.hooks import Hook, StepContext
from hybridtron.train.metrics import StepMetrics
from hybridtron.train.outcome import finite
from hybridtron.train.records import read_record
from hybridtron.train.skipped_data import BatchKey

FOLDER = "refused"
ABOUT = "about.json"
OPTIONAL = ("documents", "continues")  # tensors that not every batch has
LOG = logging.getLogger(__name__)


class RefusedBatches(Hook):
    """Hook that keeps the batches of the newest refused steps. A full disk does not stop the run."""

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
        barrier()  # all processes reach it, also if the first one could not make the folder
        with warn_of_failure(context.step):
            if groups.tensor.rank == 0 and groups.pipeline.rank == 0:
                name = f"data-{groups.data.rank:05}-context-{groups.context.rank:05}.safetensors"
                (folder / name).write_bytes(save(tensors_of(context.batches)))
        return metrics


@contextmanager
def warn_of_failure(step: int) -> Iterator[None]:
    """Log a warning if the block fails to write a step's batch."""
    try:
        yield
    except OSError as error:
        LOG.warning("the batch of step %d is not kept: %s", step, error)


def make_room(folder: Path, keep: int) -> None:
    """Make an empty folder for a batch, and remove the oldest others so that `keep` folders are left."""
    shutil.rmtree(folder, ignore_errors=True)
    for old in kept_batches(folder.parents[1])[: 1 - keep or None]:
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)


@dataclass(frozen=True)
class RefusedBatch:
    """A refused step's batch as one process reads it, with the step and the reason of the refusal."""

    key: BatchKey
    step: int
    why: str
    batches: list[Batch]


def folder_of(run_dir: Path, key: BatchKey) -> Path:
    """Return the folder of a kept batch."""
    return run_dir / FOLDER / f"phase-{key.phase}-batch-{key.step:08d}"


def key_of(folder: Path) -> BatchKey:
    """Return the key of the batch that a folder holds. Raises Unusable if its name is another."""
    if (match := re.fullmatch(r"phase-(\d+)-batch-(\d+)", folder.name)) is None:
        raise Unusable(
            f"{folder} is not a batch of a refused step: such a folder is called phase-N-batch-N", code="malformed"
        )
    return BatchKey(int(match[1]), int(match[2]))


def kept_batches(run_dir: Path) -> list[Path]:
    """Return the folders of a run's kept batches, by the steps that were refused, the newest last."""
    folders = [path.parent for path in (run_dir / FOLDER).glob(f"phase-*/{ABOUT}")]
    return sorted(folders, key=lambda path: (read_record(path / ABOUT).get("step", 0), path.name))


def tensors_of(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Stack a step's micro-batches, which all have the same shape."""
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
    """Read a kept batch with full rows, its micro-batches in the order in which one process takes them.

    `turns` is the number of chunks that a step reads of each lane, one after another. Raises Unusable.
    """
    about = read_record(folder / ABOUT)
    files = sorted(folder.glob("data-*.safetensors"))
    if not about or not files:
        fault = "has no batch of a refused step: the run was killed while it was written; name another"
        raise Unusable(f"{folder} {fault}", code="unreadable")
    parts: dict[str, list[Mapping[str, Tensor]]] = {}
    for file in files:
        parts.setdefault(file.name.split("-context-")[0], []).append(load_file(file))
    ranks = [_joined_rows(shares) for shares in parts.values()]
    groups = len(ranks[0]["tokens"]) // turns
    batches = [
        _batch_of(tensors, turn * groups + group)
        for turn in range(turns)
        for tensors in ranks
        for group in range(groups)
    ]
    return RefusedBatch(key_of(folder), about["step"], about["why"], batches)


def _joined_rows(shares: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the sequence shards of the same rows; a row continues its document if its first shard does."""
    first = shares[0]
    return {
        name: first[name] if name == "continues" else torch.cat([share[name] for share in shares], dim=2)
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
