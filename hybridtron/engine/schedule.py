"""Forward and backward passes of a step over its micro-batches, by Megatron's schedules.

One process, 1F1B and interleaved stages all run through here. A loss is a sum over tokens; Megatron divides the
gradients by the number of tokens of the whole step, over all micro-batches and ranks, however unequal their masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from hybridtron.data.batch import Batch
from hybridtron.engine.states import Carrier
from hybridtron.engine.through_time import Ended, ThroughTime, as_gathered
from hybridtron.model.lm import LanguageModel, ModelOut
from hybridtron.parallel.linear import TensorGroup
from hybridtron.parallel.loss import linear_cross_entropy


class StepLoss(NamedTuple):
    """Cross entropy summed over the unmasked tokens of all ranks, and how many these are; known to every rank.

    Both have an entry for each part where the batches are of several.
    """

    total: Tensor
    tokens: Tensor

    @property
    def mean(self) -> Tensor:
        return self.total / self.tokens.clamp(min=1)


class Parted(NamedTuple):
    """Which of `count` parts each of this rank's batches belongs to: losses are summed for each part."""

    of_batch: Sequence[int]
    count: int


def run_schedule(
    stages: Sequence[nn.Module],
    batches: Sequence[Batch],
    z_loss: float,
    tensor: TensorGroup,
    device: torch.device,
    carrier: Carrier | None = None,
    forward_only: bool = False,
    parted: Parted | None = None,
) -> StepLoss:
    """Run the micro-batches of this data-parallel rank through the pipeline; adds up gradients unless forward_only.

    Every rank brings the batches itself, since each needs the boundaries of documents, and the ends need the tokens.
    The carrier hands each row its state; without one all start from zero. Core passes a forward pass nothing about
    its micro-batch, so each chunk's iterator does.
    """
    rows, length = batches[0].tokens_BL.shape
    schedule: Any = get_forward_backward_func()
    reports = schedule(
        forward_step_func=partial(_forward_step, z_loss=z_loss, tensor=tensor, device=device, carrier=carrier),
        data_iterator=[_numbered(chunk, batches) for chunk in range(len(stages))],
        model=list(stages),
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=forward_only,
    )
    totals = torch.zeros(1 if parted is None else parted.count, 2, dtype=torch.float64, device=device)
    for number, report in enumerate(reports):
        totals[0 if parted is None else parted.of_batch[number]] += report
    dist.all_reduce(totals, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    totals = totals[0] if parted is None else totals
    return StepLoss(totals[..., 0], totals[..., 1])


def _numbered(chunk: int, batches: Sequence[Batch]) -> Iterator[tuple[int, int, Batch]]:
    """The micro-batches of one chunk, with its number and theirs."""
    for number, batch in enumerate(batches):
        yield chunk, number, batch


def _forward_step(
    batches: Iterator[tuple[int, int, Batch]],
    stage: nn.Module,
    z_loss: float,
    tensor: TensorGroup,
    device: torch.device,
    carrier: Carrier | None,
) -> tuple[Tensor, Any]:
    """One micro-batch through one chunk."""
    chunk, number, batch = next(batches)
    batch = batch.to(device)
    states = None if carrier is None else carrier.initial(chunk, number, batch)
    chunks = 1 if carrier is None else carrier.together
    if carrier is not None and chunks > 1:
        through = ThroughTime(chunks, partial(carrier.handed_over, chunk), _finished)
        ended: Ended = stage(batch, states, through)
    else:
        out: ModelOut = stage(batch, states)
        ended = Ended(_finished(out, batch), out.states)
    if carrier is not None:
        carrier.record_final(chunk, number, ended.states)
    wrapped: Any = stage.module
    loss_of = partial(_loss_of, model=wrapped.model, batch=batch, chunks=chunks, z_loss=z_loss, tensor=tensor)
    return ended.output, loss_of


def _finished(out: ModelOut, batch: Batch) -> Tensor:
    """What a stage makes of its part of a batch."""
    return with_auxiliary_losses(out.output, list(out.aux.values()), batch.mask_BL.sum())


def _loss_of(
    x_LBD: Tensor, model: LanguageModel, batch: Batch, chunks: int, z_loss: float, tensor: TensorGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """What Megatron asks of the last stage: the loss summed over tokens, their number, and what to report."""
    labels_LB, mask_LB = (as_gathered(x_BL.T, chunks, tensor) for x_BL in (batch.labels_BL, batch.mask_BL))
    loss = linear_cross_entropy(x_LBD, model.output_weight(), labels_LB, mask_LB, z_loss, tensor)
    report = torch.stack([loss.cross_entropy.detach().double(), loss.tokens.double()])
    return loss.total, loss.tokens.int(), report


def with_auxiliary_losses(output: Tensor, losses: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """The output, made to bring auxiliary losses into the backward pass of its own stage.

    Each is a mean over the micro-batch and counts with its number of tokens, as the gradients of all are divided by
    the number of tokens of the step.
    """
    for loss in losses:
        output = MoEAuxLossAutoScaler.apply(output, loss * tokens)
    return output.clone() if losses else output  # a view of itself by now, which Megatron can't free behind a stage
