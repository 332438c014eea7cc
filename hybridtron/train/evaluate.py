"""Held-out loss at the training length and at multiples of it, every row from zero states."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from hybridtron.config.schema import Config, PhaseConfig
from hybridtron.config.units import parse_tokens
from hybridtron.data.batch import Batch
from hybridtron.data.sources import Sources
from hybridtron.data.validation import held_out
from hybridtron.engine.engine import Engine


def evaluate(engine: Engine, sources: Sources, config: Config, phase: PhaseConfig) -> dict[str, float]:
    """Mean cross entropy per token, by length: {"1x": 3.21, "2x": 3.18}."""
    losses = {}
    for multiple in config.run.eval_lengths:
        rows = max(1, phase.micro_batch // multiple)
        tokens = parse_tokens(config.run.eval_tokens)
        batches = list(held_out(sources, config.documents_of(phase), phase.seq_len * multiple, tokens, rows))
        losses[f"{multiple}x"] = engine.loss(shared_out(batches, rows, engine)).mean.item()
    return losses


def shared_out(batches: list[Batch], rows: int, engine: Engine) -> list[Batch]:
    """This data-parallel rank's batches: as many on each, a multiple of the stages, all of the same shape.

    What is missing is filled up with rows that are masked, and so count nowhere.
    """
    ranks, stages = engine.groups.data_size, engine.groups.pipeline_size
    each = math.ceil(len(batches) / (ranks * stages)) * stages
    full = [padded(batch, rows) for batch in batches]
    nothing = replace(full[0], mask_BL=torch.zeros_like(full[0].mask_BL))
    full += [nothing] * (each * ranks - len(full))
    return full[engine.groups.data_rank * each :][:each]


def padded(batch: Batch, rows: int) -> Batch:
    """The batch with so many rows; those beyond its own repeat its first one under a mask."""
    missing = rows - len(batch.tokens_BL)
    if missing == 0:
        return batch
    index = torch.tensor([*range(len(batch.tokens_BL)), *[0] * missing])
    filled = batch.map(lambda tensor: tensor[index])
    filled.mask_BL[-missing:] = False
    return filled
