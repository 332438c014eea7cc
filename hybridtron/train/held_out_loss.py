"""Held-out loss at the training length and its multiples.

The held-out loss is the mean cross entropy over the learned tokens in held-out text. Learned tokens are all tokens that
the loss mask does not exclude. Every row (sequence) starts from zero states, even if training carries states from one
row to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.units import parse_tokens
from hybridtron.data.batch import Batch
from hybridtron.data.sources import Sources
from hybridtron.data.validation import HeldOutBatch, held_out
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.train.hooks import Hook, StepContext
from hybridtron.train.metrics import StepMetrics


class HeldOutLoss(Hook):
    """Hook that adds held-out losses to a step's metrics at each evaluation."""

    def on_evaluation(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        losses, by_source = evaluate(context.engine, context.loader.sources, context.phase)
        several = by_source if len(by_source) > 1 else None
        return replace(metrics, validation=losses, validation_by_source=several)


def evaluate(engine: Engine, sources: Sources, phase: ResolvedPhase) -> tuple[dict[str, float], dict[str, float]]:
    """Return the held-out losses by length, and the held-out losses by source.

    `run.eval_lengths` lists the lengths, as multiples of the training length. For example, the losses by length are
    {"1x": 3.21, "2x": 3.18}. The losses by source are measured at the first length. A length without learned tokens has
    the loss nan; a source without learned tokens is left out.
    """
    run = phase.config.run
    settings = phase.settings
    documents = phase.documents
    tokens = parse_tokens(run.eval_tokens)
    longest = settings.seq_len * max(run.eval_lengths)
    names = [source.name for source in sources.having("validation")]
    by_length: dict[str, float] = {}
    by_source: dict[str, float] = {}
    for multiple in run.eval_lengths:
        rows = max(1, settings.micro_batch // multiple)
        batches = held_out(sources, documents, settings.seq_len * multiple, tokens, rows, longest)
        own_batches = shared_out(batches, rows, engine.groups)
        numbered = [(names.index(source), batch) for source, batch in own_batches]
        losses = engine.losses(numbered, len(names))
        by_length[f"{multiple}x"] = (losses.total.sum() / losses.tokens.sum()).item()
        if not by_source:
            means = zip(names, losses.mean.tolist(), losses.tokens.tolist(), strict=True)
            by_source = {name: mean for name, mean, counted in means if counted}
    return by_length, by_source


def shared_out(batches: Sequence[HeldOutBatch], rows: int, groups: Groups) -> list[tuple[str, Batch]]:
    """Read the batches for this data-parallel rank, each with its source's name.

    The batches are divided among the ranks. All ranks get equally many batches: a multiple of the pipeline stage count.
    If there are too few batches for this, a rank gets copies of a batch. A batch with fewer than `rows` rows gets
    copies of a row. All copies are masked, so that they do not count in the loss.
    """
    ranks = groups.data.size
    stages = groups.pipeline.size
    batches_per_rank = math.ceil(len(batches) / (ranks * stages)) * stages
    chosen = batches[groups.data.rank * batches_per_rank :][:batches_per_rank]
    own_batches = [(batch.source, padded(batch.read(), rows)) for batch in chosen or batches[:1]]
    source, first = own_batches[0]
    masked_copy = replace(first, mask_BL=torch.zeros_like(first.mask_BL))
    return own_batches[: len(chosen)] + [(source, masked_copy)] * (batches_per_rank - len(chosen))


def padded(batch: Batch, rows: int) -> Batch:
    """Return the batch padded to `rows` rows with copies of its first row. The copies are masked in the loss."""
    missing = rows - len(batch.tokens_BL)
    if missing == 0:
        return batch
    index = torch.tensor([*range(len(batch.tokens_BL)), *[0] * missing])
    filled = batch.map(lambda tensor: tensor[index])
    filled.mask_BL[-missing:] = False
    return filled
