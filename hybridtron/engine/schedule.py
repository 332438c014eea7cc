"""Forward and backward passes of a step over its micro-batches, by Megatron's schedules.

One process, 1F1B and interleaved stages all run through here. A loss is a sum over tokens; Megatron divides the
gradients by the number of tokens of the whole step, over all micro-batches and ranks, however unequal their masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from hybridtron.data.batch import Batch
from hybridtron.engine.states import Carrier
from hybridtron.engine.through_time import Ended, ThroughTime
from hybridtron.model.lm import ModelOut
from hybridtron.parallel.linear import TensorGroup
from hybridtron.parallel.loss import cross_entropy

LossOf = Callable[..., tuple[Tensor, Tensor, Tensor]]


class StepLoss(NamedTuple):
    """Cross entropy summed over the unmasked tokens of all ranks, and how many these are; known to every rank."""

    total: Tensor
    tokens: Tensor

    @property
    def mean(self) -> Tensor:
        return self.total / self.tokens.clamp(min=1)


def run_schedule(
    stages: Sequence[nn.Module],
    batches: Sequence[Batch],
    z_loss: float,
    tensor: TensorGroup,
    device: torch.device,
    carrier: Carrier | None = None,
    forward_only: bool = False,
) -> StepLoss:
    """Run the micro-batches of this data-parallel rank through the pipeline; adds up gradients unless forward_only.

    Every rank brings the batches itself, since each needs the borders of documents, and the ends need the tokens. The
    carrier hands each row its state; without one all start from zero. Core tells a forward pass nothing of its
    micro-batch, so each chunk's iterator does.
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
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for report in reports:
        totals += report
    dist.all_reduce(totals, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    return StepLoss(totals[0], totals[1])


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
    loss_of = partial(_loss_of, z_loss=z_loss, tensor=tensor)
    states = None if carrier is None else carrier.initial(chunk, number, batch)
    if carrier is not None and carrier.together > 1:
        wrapped: Any = stage.module
        finished = partial(_finished, loss_of=loss_of if wrapped.post_process else None)
        ended: Ended = stage(
            batch, states, ThroughTime(carrier.together, partial(carrier.handed_over, chunk), finished)
        )
        carrier.keep(chunk, number, ended.states)
        return ended.output, _sum_of
    out: ModelOut = stage(batch, states)
    if carrier is not None:
        carrier.keep(chunk, number, out.states)
    return _finished(out, batch), partial(loss_of, batch=batch)


def _finished(out: ModelOut, batch: Batch, loss_of: LossOf | None = None) -> Tensor:
    """What a stage makes of its part of a batch: its output, or where told how, the loss and its report, (1, 4)."""
    output = with_auxiliary_losses(out.output, list(out.aux.values()), batch.mask_BL.sum())
    if loss_of is None:
        return output
    total, tokens, report = loss_of(output, batch=batch)
    return torch.cat([total.double()[None], tokens.double()[None], report])[None]


def _sum_of(losses_C4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What Megatron asks of the last stage, of chunks whose losses are taken."""
    sums_4 = losses_C4.detach().sum(0)
    return losses_C4[:, 0].sum(), sums_4[1].int(), sums_4[2:]


def _loss_of(logits_LBV: Tensor, batch: Batch, z_loss: float, tensor: TensorGroup) -> tuple[Tensor, Tensor, Tensor]:
    """What Megatron asks of the last stage: the loss summed over tokens, their number, and what to report."""
    loss = cross_entropy(logits_LBV, batch.labels_BL.T, batch.mask_BL.T, z_loss, tensor)
    report = torch.stack([loss.cross_entropy.detach().double(), loss.tokens.double()])
    return loss.total, loss.tokens.int(), report


def with_auxiliary_losses(output: Tensor, losses: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """The output, made to bring auxiliary losses into the backward pass of its own stage.

    Each is a mean over the micro-batch and counts with its number of tokens, as the gradients of all are divided by
    the number of tokens of the step.
    """
    for loss in losses:
        output = _Attached.apply(output, loss * tokens)
    return output


class _Attached(torch.autograd.Function):
    """Passes a tensor on; in backward the attached scalar gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)
