"""Forward and backward passes of a step over its micro-batches, by Megatron's schedules.

One process, 1F1B and interleaved stages all run through here. A loss is a sum over tokens; Megatron divides the
gradients by the number of tokens of the whole step, over all micro-batches and ranks, however unequal their masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from hybridtron.data.batch import Batch
from hybridtron.engine.states import Carrier
from hybridtron.engine.through_time import ChunkOut, Ended, ThroughTime, as_gathered
from hybridtron.model.lm import LanguageModel, ModelOut
from hybridtron.parallel.context import own_share
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import TensorGroup
from hybridtron.parallel.loss import linear_cross_entropy


class StepLoss(NamedTuple):
    """Cross entropy summed over the unmasked tokens of all ranks, and how many these are; known to every rank.

    Both have an entry for each part where the batches are of several. `auxiliary` has the same sum of each auxiliary
    loss by its name, which the cross entropy does not contain.
    """

    total: Tensor
    tokens: Tensor
    auxiliary: Mapping[str, Tensor] = MappingProxyType({})

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
    groups: Groups,
    device: torch.device,
    carrier: Carrier | None = None,
    forward_only: bool = False,
    parted: Parted | None = None,
    auxiliary: Sequence[str] = (),
) -> StepLoss:
    """Run the micro-batches of this data-parallel rank through the pipeline; adds up gradients unless forward_only.

    Every rank brings the batches itself, since each needs the boundaries of documents, and the ends need the tokens.
    The carrier hands each row its state; without one all start from zero. Core passes a forward pass nothing about
    its micro-batch, so each chunk's iterator does. Where ranks share rows, batches are of whole rows or of a rank's own
    parts. `auxiliary` names the losses that mixers of any stage add.
    """
    schedule: Any = get_forward_backward_func()
    sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in auxiliary}
    step = partial(_forward_step, z_loss=z_loss, groups=groups, device=device, carrier=carrier, sums=sums)
    reports = schedule(
        forward_step_func=step,
        data_iterator=[_numbered(chunk, batches) for chunk in range(len(stages))],
        model=list(stages),
        num_microbatches=len(batches),
        seq_length=_length_sent(stages, batches[0]),
        micro_batch_size=len(batches[0].tokens_BL),
        forward_only=forward_only,
    )
    totals = torch.zeros(1 if parted is None else parted.count, 2, dtype=torch.float64, device=device)
    for number, report in enumerate(reports):
        totals[0 if parted is None else parted.of_batch[number]] += report
    dist.all_reduce(totals, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    totals = totals[0] if parted is None else totals
    return StepLoss(totals[..., 0], totals[..., 1], _of_all_ranks(sums))


def _length_sent(stages: Sequence[nn.Module], batch: Batch) -> int:
    """Of what a stage sends on of a row: its tokens, those of all shares, and again those of the embedding."""
    first: Any = stages[0].module
    length, share = batch.tokens_BL.shape[1], batch.seq.share
    return length * (1 if share is None else share.size) * (2 if first.model.carries_embedding else 1)


def _of_all_ranks(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of auxiliary losses the sums over stages and data-parallel ranks, and the mean over tensor-parallel ones."""
    if not sums:
        return {}
    together = torch.stack(list(sums.values()))
    dist.all_reduce(together, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(together, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(together, group=parallel_state.get_tensor_model_parallel_group())
    together /= parallel_state.get_tensor_model_parallel_world_size()
    return dict(zip(sums, together, strict=True))


def _numbered(chunk: int, batches: Sequence[Batch]) -> Iterator[tuple[int, int, Batch]]:
    """The micro-batches of one chunk, with its number and theirs."""
    for number, batch in enumerate(batches):
        yield chunk, number, batch


def _forward_step(
    batches: Iterator[tuple[int, int, Batch]],
    stage: nn.Module,
    z_loss: float,
    groups: Groups,
    device: torch.device,
    carrier: Carrier | None,
    sums: Mapping[str, Tensor],
) -> tuple[Tensor, Any]:
    """One micro-batch through one chunk; what it has of auxiliary losses is added to the sums."""
    chunk, number, batch = next(batches)
    batch = own_share(batch, groups.context).to(device)
    states = None if carrier is None else carrier.initial(chunk, number, batch)
    chunks = 1 if carrier is None else carrier.together
    if carrier is not None and chunks > 1:
        through = ThroughTime(chunks, partial(carrier.handed_over, chunk), _finished)
        ended: Ended = stage(batch, states, through)
    else:
        out: ModelOut = stage(batch, states)
        output, losses = _finished(out, batch)
        ended = Ended(output, out.states, losses)
    for name, loss in ended.auxiliary.items():
        sums[name].add_(loss)
    if carrier is not None:
        carrier.record_final(chunk, number, ended.states)
    wrapped: Any = stage.module
    loss_of = partial(_loss_of, model=wrapped.model, batch=batch, chunks=chunks, z_loss=z_loss, tensor=groups.tensor)
    return ended.output, loss_of


def _finished(out: ModelOut, batch: Batch) -> ChunkOut:
    """What a stage makes of its part of a batch.

    An auxiliary loss is a mean over the micro-batch and counts with its number of tokens, as the gradients of all are
    divided by the number of tokens of the step.
    """
    tokens = batch.mask_BL.sum()
    losses = {name: loss * tokens for name, loss in out.aux.items()}
    output = with_auxiliary_losses(out.output, list(losses.values()))
    return ChunkOut(output, {name: loss.detach() for name, loss in losses.items()})


def _loss_of(
    x_LBD: Tensor, model: LanguageModel, batch: Batch, chunks: int, z_loss: float, tensor: TensorGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """What Megatron asks of the last stage: the loss summed over tokens, their number, and what to report."""
    labels_LB, mask_LB = (as_gathered(x_BL.T, chunks, tensor) for x_BL in (batch.labels_BL, batch.mask_BL))
    loss = linear_cross_entropy(x_LBD, model.output_weight(), labels_LB, mask_LB, z_loss, tensor)
    report = torch.stack([loss.cross_entropy.detach().double(), loss.tokens.double()])
    return loss.total, loss.tokens.int(), report


def with_auxiliary_losses(output: Tensor, losses: Sequence[Tensor]) -> Tensor:
    """The output, made to bring auxiliary losses into the backward pass of its own stage."""
    for loss in losses:
        output = MoEAuxLossAutoScaler.apply(output, loss)
    return output.clone() if losses else output  # a view of itself by now, which Megatron can't free behind a stage
