"""Runs the forward and backward passes of a step's micro-batches with Megatron's pipeline schedules.

Megatron selects the schedule: without pipeline, 1F1B, or interleaved. A micro-batch's loss is a sum over its loss
tokens, which are the tokens that the mask selects. Gradients are later divided by the number of loss tokens in the
step, over all micro-batches and ranks. So every loss token has equal weight, even if masks differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from hybridtron.architecture.moe import MoESpec
from hybridtron.data.batch import Batch
from hybridtron.engine.bptt import ChunkOutput, MultiChunkForward, StageOutput, to_gathered_order
from hybridtron.engine.routers import add_choices, no_choices, reduce_choices
from hybridtron.engine.states import StateCarrier
from hybridtron.mixers.base import Routed
from hybridtron.model.lm import LanguageModel, ModelOut
from hybridtron.parallel.context import local_shard
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import TensorGroup
from hybridtron.parallel.vocabulary import linear_cross_entropy


class StepLoss(NamedTuple):
    """A step's loss, which is equal on all ranks.

    total: cross entropy, summed over all loss tokens; an array with one element per part if there are `BatchParts`
    tokens: how many loss tokens there are, in the same shape as `total`
    auxiliary: the mixers' auxiliary losses by name, multiplied by loss tokens and summed; `total` does not include them
    choices: in training, the choices of each router in the model, by its sub-layer's index
    """

    total: Tensor
    tokens: Tensor
    auxiliary: Mapping[str, Tensor] = MappingProxyType({})
    choices: Mapping[int, Routed] = MappingProxyType({})

    @property
    def mean(self) -> Tensor:
        """Mean cross entropy per loss token."""
        return self.total / self.tokens.clamp(min=1)


class BatchParts(NamedTuple):
    """Assignment of batches to parts of the data, whose losses are summed separately.

    of_batch: for each batch, its part's index
    count: how many parts there are
    """

    of_batch: Sequence[int]
    count: int


def run_schedule(
    stages: Sequence[nn.Module],
    batches: Sequence[Batch],
    z_loss: float,
    groups: Groups,
    device: torch.device,
    carrier: StateCarrier | None = None,
    forward_only: bool = False,
    batch_parts: BatchParts | None = None,
    auxiliary: Sequence[str] = (),
    routers: Mapping[int, MoESpec] = MappingProxyType({}),
) -> StepLoss:
    """Run this data-parallel rank's micro-batches through the pipeline; accumulate gradients unless `forward_only`.

    stages: this rank's pipeline stages
    batches: the micro-batches, which must be equal on all pipeline ranks, because each rank needs document boundaries.
        With context parallelism they hold full rows or this rank's sequence shards.
    carrier: provides the rows' initial states; None for zero states
    auxiliary: names of the auxiliary losses that the model's mixers have
    routers: the model's sub-layers with experts; in evaluation none, because choices are counted only in training
    """
    sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in auxiliary}
    choices = no_choices(routers, device)
    step = partial(
        _forward_step, z_loss=z_loss, groups=groups, device=device, carrier=carrier, sums=sums, choices=choices
    )
    reports = _run_passes(stages, batches, step, forward_only)
    totals = torch.zeros(1 if batch_parts is None else batch_parts.count, 2, dtype=torch.float64, device=device)
    for number, report in enumerate(reports):
        totals[0 if batch_parts is None else batch_parts.of_batch[number]] += report
    dist.all_reduce(totals, group=groups.pipeline.group)  # zero on every pipeline rank but the last
    dist.all_reduce(totals, group=groups.dense.copies.group)
    totals = totals[0] if batch_parts is None else totals
    return StepLoss(totals[..., 0], totals[..., 1], _reduce_auxiliary(sums, groups), reduce_choices(choices, groups))


def run_both_passes(
    stages: Sequence[nn.Module], batch: Batch, z_loss: float, groups: Groups, device: torch.device
) -> Tensor:
    """Run both passes of one micro-batch through a model without pipeline, experts and carried states.

    Accumulates gradients, and returns the report of `_loss_of`. Megatron also calls the function that finalizes
    gradients, as after a step's last micro-batch.
    """
    step = partial(_forward_step, z_loss=z_loss, groups=groups, device=device, carrier=None, sums={}, choices={})
    (report,) = _run_passes(stages, [batch], step, forward_only=False)
    return report


def run_unreduced(
    stages: Sequence[nn.Module],
    batch: Batch,
    z_loss: float,
    groups: Groups,
    device: torch.device,
    auxiliary: Sequence[str] = (),
    routers: Mapping[int, MoESpec] = MappingProxyType({}),
) -> None:
    """Run both passes of one micro-batch from zero states, and accumulate gradients without reducing them.

    Data-parallel ranks exchange nothing. Carried states, losses and the choices of routers are not kept. Virtual stages
    take the micro-batch several times, because their schedule needs as many micro-batches as pipeline ranks.
    """
    sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in auxiliary}
    choices = no_choices(routers, device)
    step = partial(_forward_step, z_loss=z_loss, groups=groups, device=device, carrier=None, sums=sums, choices=choices)
    batches = [batch] * (groups.pipeline.size if len(stages) > 1 else 1)
    config: Any = stages[0].config
    finalize = config.finalize_model_grads_func
    no_sync = config.no_sync_func
    config.finalize_model_grads_func = _finalize_nothing
    config.no_sync_func = nullcontext  # Megatron's own context would end before the last micro-batch
    try:
        with ExitStack() as unreduced:
            for stage in stages:
                wrapped: Any = stage
                unreduced.enter_context(wrapped.no_sync())
            _run_passes(stages, batches, step, forward_only=False)
    finally:
        config.finalize_model_grads_func = finalize
        config.no_sync_func = no_sync


def _finalize_nothing(
    stages: Any, tokens: Tensor | None = None, pg_collection: Any = None, force_all_reduce: bool = False
) -> None:
    """Leave gradients as they are; takes the place of Megatron's function, which reduces them."""


def _run_passes(
    stages: Sequence[nn.Module], batches: Sequence[Batch], step: Callable[..., Any], forward_only: bool
) -> list[Tensor]:
    """Run Megatron's schedule; return the micro-batches' reports, or [] on ranks without the last stage."""
    schedule: Any = get_forward_backward_func()
    return schedule(
        forward_step_func=step,
        data_iterator=[_number_batches(chunk, batches) for chunk in range(len(stages))],
        model=list(stages),
        num_microbatches=len(batches),
        seq_length=_schedule_length(stages, batches[0]),
        micro_batch_size=len(batches[0].tokens_BL),
        forward_only=forward_only,
    )


def _schedule_length(stages: Sequence[nn.Module], batch: Batch) -> int:
    """Return the sequence length from which Megatron computes the shape for tensors between stages.

    Megatron divides the length among the context-parallel ranks, so it is the length of full rows. The length is
    doubled if stages send the embedding in addition to the residual stream.
    """
    first: Any = stages[0].module
    length = batch.tokens_BL.shape[1]
    shard = batch.seq.shard
    return length * (1 if shard is None else shard.size) * (2 if first.model.carries_embedding else 1)


def _reduce_auxiliary(sums: Mapping[str, Tensor], groups: Groups) -> dict[str, Tensor]:
    """Return auxiliary losses, summed over stages and data-parallel ranks, and averaged over tensor-parallel ranks."""
    if not sums:
        return {}
    together = torch.stack(list(sums.values()))
    for ranks in (groups.pipeline, groups.dense.copies, groups.tensor):
        dist.all_reduce(together, group=ranks.group)
    together /= groups.tensor.size
    return dict(zip(sums, together, strict=True))


def _number_batches(chunk: int, batches: Sequence[Batch]) -> Iterator[tuple[int, int, Batch]]:
    """Yield (the stage's index, the micro-batch's index, micro-batch) for one stage on this rank.

    The indices are needed because Megatron does not pass them to the forward step.
    """
    for number, batch in enumerate(batches):
        yield chunk, number, batch


def _forward_step(
    batches: Iterator[tuple[int, int, Batch]],
    stage: nn.Module,
    z_loss: float,
    groups: Groups,
    device: torch.device,
    carrier: StateCarrier | None,
    sums: Mapping[str, Tensor],
    choices: Mapping[int, Routed],
) -> tuple[Tensor, Any]:
    """Run the next micro-batch through a stage, and add its auxiliary losses to `sums`, its choices to `choices`.

    Returns the stage's output, and the function that Megatron calls on the last stage to compute the loss.
    """
    chunk, number, batch = next(batches)
    batch = local_shard(batch, groups.context).to(device)
    if carrier is None:
        states = None
    else:
        states = carrier.initial(chunk, number, batch)
    chunks = 1 if carrier is None else carrier.chunks_together
    if carrier is not None and chunks > 1:
        forward = MultiChunkForward(chunks, partial(carrier.next_chunk_states, chunk), _chunk_output)
        stage_output: StageOutput = stage(batch, states, forward)
    else:
        out: ModelOut = stage(batch, states)
        output, losses, routed = _chunk_output(out, batch)
        stage_output = StageOutput(output, out.states, losses, routed)
    for name, loss in stage_output.auxiliary.items():
        sums[name].add_(loss)
    add_choices(choices, stage_output.routed)
    if carrier is not None:
        carrier.record_final(chunk, number, stage_output.states)
    wrapped: Any = stage.module
    loss_of = partial(_loss_of, model=wrapped.model, batch=batch, chunks=chunks, z_loss=z_loss, tensor=groups.tensor)
    return stage_output.output, loss_of


def _chunk_output(out: ModelOut, batch: Batch) -> ChunkOutput:
    """Return a stage's output for a batch, with the batch's auxiliary losses attached to the output's gradient.

    An auxiliary loss is a mean over each row (B,), or a scalar, a mean over the batch. It is multiplied by the number
    of loss tokens in each row, because gradients are later divided by the step's number of loss tokens. Rows may have
    different numbers: a mean over rows would depend on which rows share a micro-batch.
    """
    tokens_B = batch.mask_BL.sum(1)
    losses = {name: (loss * tokens_B).sum() for name, loss in out.aux.items()}
    output = with_auxiliary_losses(out.output, list(losses.values()))
    return ChunkOutput(output, {name: loss.detach() for name, loss in losses.items()}, out.routed)


def _loss_of(
    x_LBD: Tensor, model: LanguageModel, batch: Batch, chunks: int, z_loss: float, tensor: TensorGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (summed loss, number of loss tokens, report), as Megatron expects from a loss function.

    chunks: how many chunks each row has, which determines the order of the output's tokens
    z_loss: coefficient for the z-loss, which is included in the summed loss but not in the report
    """
    labels_LB, mask_LB = (to_gathered_order(x_BL.T, chunks, tensor) for x_BL in (batch.labels_BL, batch.mask_BL))
    loss = linear_cross_entropy(x_LBD, model.output_weight(), labels_LB, mask_LB, z_loss, tensor)
    report = torch.stack([loss.cross_entropy.detach().double(), loss.tokens.double()])
    return loss.total, loss.tokens.int(), report


def with_auxiliary_losses(output: Tensor, losses: Sequence[Tensor]) -> Tensor:
    """Return the output with auxiliary losses attached, so that this stage's backward pass includes their gradients."""
    for loss in losses:
        output = MoEAuxLossAutoScaler.apply(output, loss)  # in the backward pass, the gradient of the loss is 1
    return output.clone() if losses else output  # `apply` returns a view, whose memory Megatron could not release
