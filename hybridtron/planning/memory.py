"""Memory and traffic of each pipeline rank of a layout: an estimate, from the configuration alone.

With t tensor-parallel, p pipeline and d data-parallel ranks (times those that share the rows, where tokens are counted
on one of these), v virtual stages, and m micro-batches a step:

    weights, gradients   of the rank's chunks, cut by t where `Parameter.cuts` says so; gradients in the format of
                         `precision.gradients`, of weights that learn, as is the optimizer. A tied embedding is held by
                         the first rank and by the last.
    optimizer            moments as `precision.moments`, fp32 masters of narrower weights; by d if distributed
    activations          kept by every chunk pass in flight (`activations.py`). Chunks of a lane that run through time
                         are all kept; if anything is recomputed, only the streams and states between them are, and
                         one chunk's activations exist while it runs again.
    logits               on the last rank, by t: as many as the loss makes at a time, however many tokens there are;
                         besides, the gradients of the head and of its input, which the loss makes with them
    backward             made by one sub-layer's backward pass, as far as it is more than the logits
    states               carried ones, of the rank's lanes and layers and by t: a step's first, and last until accepted
    traffic              of a step, by the kind of ranks (`traffic.py`)
    bubble               (p - 1) / (v m + p - 1) of the pipeline's time, if stages are equally long

The total is within `activations.MARGIN` of the rehearsed peak. Left out are buffers of the allocator, of the kernels
and of the network, and the inputs of products that FP8 keeps in one byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtron.architecture.base import Parameter
from hybridtron.architecture.table import architecture, parameter_table
from hybridtron.config.layout import chunks_on, data_parallel, layer_costs, stage_layers
from hybridtron.config.resolve import ResolvedPhase, resolve
from hybridtron.config.schema import Config
from hybridtron.planning.activations import (
    SublayerUse,
    chunks_run_again,
    held_micro_batches,
    sent_values,
    shared,
    stream_values,
    sublayer_uses,
    with_frozen,
    with_offload,
    working_values,
)
from hybridtron.planning.count import VALUE_BYTES, gradient_bytes, loss_bytes
from hybridtron.planning.row_shares import sent_by_layers, with_received
from hybridtron.planning.states import carried_bytes
from hybridtron.planning.traffic import Traffic, exchanged_values, summed_over_stages
from hybridtron.planning.weights import WeightBytes, cached_bytes, held_names, local_size, weight_bytes


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that one process holds while it trains."""

    weights: int  # as the forward pass reads them
    gradients: int  # as they are added up
    optimizer: int  # moments, and fp32 master weights where the weights are narrower
    activations: int  # kept for the backward pass by all chunk passes in flight
    logits: int  # as many as the loss makes at a time, and the gradients that it makes of its input and the head
    rounded: int = 0  # weights that FP8 products keep over micro-batches, with `precision.cache_weights`
    states: int = 0  # carried ones: a step's first and last
    backward: int = 0  # made by one sub-layer's backward pass, as far as it is more than the logits

    @property
    def total(self) -> int:
        """All of it together."""
        kept = self.activations + self.logits + self.states
        return self.weights + self.rounded + self.gradients + self.optimizer + kept + self.backward


@dataclass(frozen=True)
class PlannedStage:
    """Consecutive sub-layers on one rank, and their forward cost per token as `layout.py` weighs it."""

    index: int
    layers: range
    forward_cost: int


@dataclass(frozen=True)
class RankPlan:
    """One pipeline rank; its tensor- and data-parallel copies are alike."""

    rank: int
    chunks: tuple[PlannedStage, ...]  # virtual stage 0, 1, ...
    parameters: int  # on one device
    in_flight: int  # chunk passes whose activations are held at the peak
    memory: DeviceMemory
    traffic: Traffic


@dataclass(frozen=True)
class Plan:
    """A layout on a number of devices, in one phase."""

    world_size: int
    data: int  # data-parallel ranks
    micro_batches: int  # of each of them, in a step
    bubble: float  # share of the pipeline's time in which a rank waits
    ranks: tuple[RankPlan, ...]

    @property
    def fullest(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.memory.total)


def largest_phase(config: Config) -> ResolvedPhase:
    """Return the phase with the most tokens in one forward pass."""
    return max(resolve(config), key=lambda p: p.settings.micro_batch * p.settings.seq_len * p.chunks_together)


def plan(phase: ResolvedPhase, world_size: int) -> Plan:
    """Plan what every pipeline rank holds and sends in a phase of a configuration checked for this world size."""
    config = phase.config
    settings = phase.settings
    parallel = config.parallel
    model = config.model
    data = data_parallel(parallel, world_size)
    seq_len = max(phase_settings.seq_len for phase_settings in config.phases)
    costs = layer_costs(model, seq_len)
    stages = stage_layers(model, parallel, seq_len)
    table = parameter_table(model)
    step = _Step(
        config=config,
        phase=phase,
        data=data,
        micro_batches=settings.global_batch // (settings.micro_batch * data * phase.chunks_together),
        chunks=tuple(
            PlannedStage(index, stage, sum(costs[stage.start : stage.stop])) for index, stage in enumerate(stages)
        ),
        uses=with_received(with_frozen(sublayer_uses(config), phase, table), phase),
        exchanged=exchanged_values(phase),
        carried=carried_bytes(phase),
        handed_over=sent_by_layers(phase),
        table=table,
        held=held_names(table, architecture(model).letters, stages, parallel.pipeline),
    )
    waiting = parallel.pipeline - 1
    return Plan(
        world_size=world_size,
        data=data,
        micro_batches=step.micro_batches,
        bubble=waiting / (parallel.virtual_pipeline * step.micro_batches + waiting),
        ranks=tuple(_rank_plan(step, rank) for rank in range(parallel.pipeline)),
    )


@dataclass(frozen=True)
class _Step:
    """Values that all ranks have in common in an optimizer step."""

    config: Config
    phase: ResolvedPhase
    data: int
    micro_batches: int
    chunks: tuple[PlannedStage, ...]
    uses: tuple[SublayerUse, ...]
    exchanged: tuple[int, ...]  # values per token between tensor-parallel ranks, by sub-layer
    carried: dict[int, int]  # bytes of one lane's state, by sub-layer
    handed_over: tuple[int, ...]  # bytes between context-parallel ranks for a micro-batch, by sub-layer
    table: dict[str, Parameter]
    held: list[list[str]]  # the names in the table that each pipeline rank holds

    @property
    def copies(self) -> int:
        """Ranks that hold the same share of the weights."""
        return self.data * self.config.parallel.context

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation for every token of a micro-batch's chunk."""
        return VALUE_BYTES[self.config.precision.name] * self.phase.tokens_of_rank

    def sublayers(self, chunk: PlannedStage) -> tuple[SublayerUse, ...]:
        """Return the activations of a chunk's sub-layers."""
        received = sent_values(self.config) * (chunk.index > 0)
        uses = [self.uses[layer] for layer in chunk.layers]
        return with_offload(uses, self.config.parallel.offload, received)

    def lane_bytes(self, chunk: PlannedStage) -> int:
        """Return the bytes of one lane's carried state in a chunk of the model."""
        return sum(self.carried.get(layer, 0) for layer in chunk.layers)


def _rank_plan(step: _Step, rank: int) -> RankPlan:
    parallel = step.config.parallel
    chunks = tuple(step.chunks[index] for index in chunks_on(parallel, rank))
    weights = {name: step.table[name] for name in step.held[rank]}
    kept = [_kept(step, chunk) for chunk in chunks]
    in_flight = max(
        held_micro_batches(parallel, rank, step.micro_batches),
        key=lambda held: sum(number * size for number, size in zip(held, kept, strict=True)),
    )
    held = weight_bytes(step.phase, step.copies, weights)
    logits = _logits(step, chunks)
    return RankPlan(
        rank=rank,
        chunks=chunks,
        parameters=sum(local_size(weight, parallel) for weight in weights.values()),
        in_flight=sum(in_flight),
        memory=DeviceMemory(
            weights=held.stored,
            rounded=cached_bytes(step.config, weights),
            gradients=held.gradients,
            optimizer=held.optimizer,
            activations=sum(number * size for number, size in zip(in_flight, kept, strict=True)),
            logits=logits,
            states=2 * step.phase.lanes // step.data * sum(step.lane_bytes(chunk) for chunk in chunks),
            backward=_streams(step, rank) + max(0, *(_working(step, chunk) - logits for chunk in chunks)),
        ),
        traffic=_traffic(step, rank, chunks, held),
    )


def _kept(step: _Step, chunk: PlannedStage) -> int:
    """Return the bytes that a chunk of the model keeps of a micro-batch from its forward to its backward pass."""
    together = step.phase.chunks_together
    is_last = chunk is step.chunks[-1]
    if chunks_run_again(step.phase):  # what stands between the chunks of a lane, and the stream that the loss reads
        between = sent_values(step.config) + step.config.model.width * is_last
        states = step.phase.settings.micro_batch * step.lane_bytes(chunk)
        return (between * step.value_bytes + states) * together
    last_norm = (stream_values(step.config) + step.config.model.width) * is_last
    return (sum(use.kept for use in step.sublayers(chunk)) + last_norm) * step.value_bytes * together


def _working(step: _Step, chunk: PlannedStage) -> int:
    """Return the bytes that the passes of a chunk of the model hold at most, beyond those kept."""
    uses = step.sublayers(chunk)
    values = working_values(uses)
    if chunks_run_again(step.phase):
        values += sum(use.kept for use in uses)
    return values * step.value_bytes


def _streams(step: _Step, rank: int) -> int:
    """Return the bytes of streams that the schedule holds: a received one with its gradient; interleaved, sent ones."""
    held = 2 * (rank > 0) + 2 * (step.config.parallel.virtual_pipeline > 1)
    return held * sent_values(step.config) * step.value_bytes * step.phase.chunks_together


def _logits(step: _Step, chunks: Sequence[PlannedStage]) -> int:
    """Return the bytes that the loss makes."""
    if chunks[-1] is not step.chunks[-1]:
        return 0
    model = step.config.model
    tokens = step.phase.tokens_of_rank * step.phase.chunks_together
    vocabulary = shared(model.vocab_size, step.config.parallel.tensor)
    learns = step.phase.learns("embedding.weight" if model.tie_embeddings else "head.weight")
    return loss_bytes(tokens, model.width, vocabulary, VALUE_BYTES[step.config.precision.name], learns)


def _traffic(step: _Step, rank: int, chunks: Sequence[PlannedStage], held: WeightBytes) -> Traffic:
    parallel = step.config.parallel
    model = step.config.model
    is_first = rank == 0
    is_last = rank == parallel.pipeline - 1
    layers = [layer for chunk in chunks for layer in chunk.layers]
    values = step.value_bytes * step.phase.chunks_together * step.micro_batches
    # the embedding's output is summed, and the gradient of the head's input
    exchanged = sum(step.exchanged[layer] for layer in layers) + 2 * (is_first + is_last) * model.width
    borders = 0
    if parallel.pipeline > 1:
        borders = 2 * len(chunks) - is_first - is_last
    is_tied = model.tie_embeddings and is_first != is_last and step.phase.learns("embedding.weight")
    tied = gradient_bytes(step.config.precision, False) * model.vocab_size * model.width // parallel.tensor
    between_stages = tied * is_tied + summed_over_stages(step.phase, step.table, step.held)
    sharded = parallel.distributed_optimizer
    return Traffic(
        tensor=(parallel.tensor - 1) * exchanged * values // parallel.tensor,
        pipeline=borders * sent_values(step.config) * values,
        gradients=(1 if sharded else 2) * held.gradients * (step.copies - 1) // step.copies + between_stages,
        parameters=held.learning * (step.copies - 1) // step.copies if sharded else 0,
        context=step.micro_batches * sum(step.handed_over[layer] for layer in layers),
        host=2 * values * sum(use.offloaded for chunk in chunks for use in step.sublayers(chunk)),
    )
