"""Held-out loss at the training length and its multiples. Every row starts from zero states."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.units import parse_tokens
from hybridtron.data.batch import Batch
from hybridtron.data.sources import Sources
from hybridtron.data.validation import held_out
from hybridtron.engine.engine import Engine
from hybridtron.train.hooks import Hook, StepContext
from hybridtron.train.metrics import StepMetrics


class HeldOutLoss(Hook):
    """Hook that adds held-out losses to a step's metrics at each evaluation."""

    def on_evaluation(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        context.run.beat(f"the evaluation at step {context.step}")
        losses, by_source = evaluate(context.engine, context.loader.sources, context.phase)
        several = by_source if len(by_source) > 1 else None
        return replace(metrics, validation=losses, validation_by_source=several)


def evaluate(engine: Engine, sources: Sources, phase: ResolvedPhase) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean cross entropy per learned token by length, {"1x": 3.21, "2x": 3.18}, and by source.

    Losses by source are those at the first length. A mean over no learned tokens is nan by length, and left out by
    source.
    """
    run = phase.config.run
    settings = phase.settings
    documents = phase.documents
    tokens = parse_tokens(run.eval_tokens)
    piece = settings.seq_len * max(run.eval_lengths)
    names = [source.name for source in sources.having("validation")]
    by_length: dict[str, float] = {}
    by_source: dict[str, float] = {}
    for multiple in run.eval_lengths:
        rows = max(1, settings.micro_batch // multiple)
        named_batches = held_out(sources, documents, settings.seq_len * multiple, tokens, rows, piece)
        batches = [(names.index(name), batch) for name, batch in named_batches]
        losses = engine.losses(shared_out(batches, rows, engine), len(names))
        by_length[f"{multiple}x"] = (losses.total.sum() / losses.tokens.sum()).item()
        if not by_source:
            means = zip(names, losses.mean.tolist(), losses.tokens.tolist(), strict=True)
            by_source = {name: mean for name, mean, counted in means if counted}
    return by_length, by_source


def shared_out(batches: list[tuple[int, Batch]], rows: int, engine: Engine) -> list[tuple[int, Batch]]:
    """Return this data-parallel rank's batches, each with its source's number.

    All ranks get equally many, a multiple of the pipeline stages, and all batches have the same shape. Masked rows,
    which do not count in the loss, fill the gaps.
    """
    ranks = engine.groups.data.size
    stages = engine.groups.pipeline.size
    batches_per_rank = math.ceil(len(batches) / (ranks * stages)) * stages
    full = [(part, padded(batch, rows)) for part, batch in batches]
    part, first = full[0]
    nothing = replace(first, mask_BL=torch.zeros_like(first.mask_BL))
    full += [(part, nothing)] * (batches_per_rank * ranks - len(full))
    return full[engine.groups.data.rank * batches_per_rank :][:batches_per_rank]


def padded(batch: Batch, rows: int) -> Batch:
    """Return the batch padded to `rows` rows; the added rows repeat the first one and are masked in the loss."""
    missing = rows - len(batch.tokens_BL)
    if missing == 0:
        return batch
    index = torch.tensor([*range(len(batch.tokens_BL)), *[0] * missing])
    filled = batch.map(lambda tensor: tensor[index])
    filled.mask_BL[-missing:] = False
    return filled
