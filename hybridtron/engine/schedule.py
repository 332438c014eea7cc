"""Forward and backward passes of a step's micro-batches, by Megatron's schedules.

One process, 1F1B and interleaved stages all run through here. A loss is a sum over tokens. Megatron divides the
gradients by the step's number of loss tokens, over all micro-batches and ranks, even if their masks differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
    """Cross entropy summed over all ranks, and the total number of loss tokens; replicated on all ranks.

    If the batches belong to several parts, both have one entry per part. `auxiliary` has the auxiliary losses by name,
    also summed over ranks; the cross entropy does not include them.
    """

    total: Tensor
    tokens: Tensor
    auxiliary: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def mean(self) -> Tensor:
        """Mean cross entropy per loss token."""
        return self.total / self.tokens.clamp(min=1)


class Parted(NamedTuple):
    """Assignment of this rank's batches to `count` parts, whose losses are summed separately."""

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
    """Run this data-parallel rank's micro-batches through the pipeline; accumulate gradients unless forward_only.

    Every pipeline rank provides the same batches, since each needs the document boundaries, and both ends need the
    tokens. The carrier provides each row's initial state; without one all rows start from zero. Megatron-core does not
    say which micro-batch a forward pass is for, so each stage's iterator does. With context parallelism, batches hold
    full rows or this rank's sequence shards. `auxiliary` names the losses that mixers of any stage add.
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
    dist.all_reduce(totals, group=groups.pipeline.group)
    dist.all_reduce(totals, group=groups.dense.copies.group)
    totals = totals[0] if parted is None else totals
    return StepLoss(totals[..., 0], totals[..., 1], _of_all_ranks(sums, groups))


def _length_sent(stages: Sequence[nn.Module], batch: Batch) -> int:
    """Return the sequence length that Megatron expects between stages; doubled if the embedding travels along.

    It is the full rows' length, since Megatron divides it by the number of context-parallel ranks.
    """
    first: Any = stages[0].module
    length = batch.tokens_BL.shape[1]
    share = batch.seq.share
    return length * (1 if share is None else share.size) * (2 if first.model.carries_embedding else 1)


def _of_all_ranks(sums: Mapping[str, Tensor], groups: Groups) -> dict[str, Tensor]:
    """Reduce auxiliary losses: sum over stages and data-parallel ranks, mean over tensor-parallel ranks."""
    if not sums:
        return {}
    together = torch.stack(list(sums.values()))
    for ranks in (groups.pipeline, groups.dense.copies, groups.tensor):
        dist.all_reduce(together, group=ranks.group)
    together /= groups.tensor.size
    return dict(zip(sums, together, strict=True))


def _numbered(chunk: int, batches: Sequence[Batch]) -> Iterator[tuple[int, int, Batch]]:
    """Yield the micro-batches of one stage, with the stage's number and theirs."""
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
    """Run one micro-batch through one stage, and add its auxiliary losses to the sums.

    Returns the output and the function by which Megatron gets the loss on the last stage.
    """
    chunk, number, batch = next(batches)
    batch = own_share(batch, groups.context).to(device)
    if carrier is None:
        states = None
    else:
        states = carrier.initial(chunk, number, batch)
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
    """Return a stage's output for a chunk, with its auxiliary losses attached.

    An auxiliary loss is a mean over the micro-batch. It is multiplied by the micro-batch's loss tokens, since all
    gradients are later divided by the step's.
    """
    tokens = batch.mask_BL.sum()
    losses = {name: loss * tokens for name, loss in out.aux.items()}
    output = with_auxiliary_losses(out.output, list(losses.values()))
    return ChunkOut(output, {name: loss.detach() for name, loss in losses.items()})


def _loss_of(
    x_LBD: Tensor, model: LanguageModel, batch: Batch, chunks: int, z_loss: float, tensor: TensorGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss summed over tokens, their number, and the values to report, in the form that Megatron expects."""
    labels_LB, mask_LB = (as_gathered(x_BL.T, chunks, tensor) for x_BL in (batch.labels_BL, batch.mask_BL))
    loss = linear_cross_entropy(x_LBD, model.output_weight(), labels_LB, mask_LB, z_loss, tensor)
    report = torch.stack([loss.cross_entropy.detach().double(), loss.tokens.double()])
    return loss.total, loss.tokens.int(), report


def with_auxiliary_losses(output: Tensor, losses: Sequence[Tensor]) -> Tensor:
    """Attach auxiliary losses to the output, so that the backward pass of this stage includes them."""
    for loss in losses:
        output = MoEAuxLossAutoScaler.apply(output, loss)
    return output.clone() if losses else output  # the result is a view, whose memory Megatron cannot release
