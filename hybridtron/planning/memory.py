"""What each pipeline rank of a layout holds, keeps and sends: an estimate, from the configuration alone.

With t tensor-parallel, p pipeline and d data-parallel ranks (times those that share the rows, where tokens are counted
on one of these), v virtual stages, and m micro batches a step:

    weights, gradients   of the rank's chunks, cut by t where `Parameter.cuts` says so; gradients in the format of
                         `precision.gradients`, of weights that learn, as is the optimizer. A tied embedding is held by
                         the first rank and by the last.
    optimizer            AdamW's moments as `precision.moments`, fp32 masters of narrower weights; by d if distributed
    activations          per sub-layer and token: the norm's input (by t under sequence parallelism), its output as the
                         projections read it (whole: it is gathered once and kept; by t with `parallel.regather`,
                         where projections are all that reads it), and the mixer's inside (by t).
                         What of it every rank has (Mamba's small dt, B, C) counts whole. A recomputed sub-layer keeps
                         the norm's input alone. Every micro batch between its two passes holds a chunk's. More in
                         `frozen_use.py` (and adapters), `beside_use.py`, `fp8_use.py`.
    in flight            1F1B: min(p - r, m) on pipeline rank r. Interleaved: Megatron's warm-up, 2 (p - r - 1) +
                         (v - 1) p chunk passes, and one more; which chunks these are is played through.
    backward             what the backward pass makes, at the sub-layer at which it holds most, and the streams that the
                         schedule sends and receives, as far as all this is more than the logits (`activations.py`)
    logits               on the last rank, by t: as many as the loss makes at a time, however many tokens there are;
                         besides, the gradients of the head and of its input, which the loss makes with them
    states               carried ones, of the rank's lanes and layers and by t: a step's first, and last until accepted
    through time         a micro batch holds all k chunks of its lanes. What is kept counts k times. If anything is
                         recomputed, only the streams and states between the chunks do, and the stream that the loss
                         reads; of the activations one chunk's exist, while it runs again.
    tensor traffic       a sub-layer sums its output (forward) and its input's gradient (backward), and what it sums
                         inside (Mamba's dt, B and C) in both; once more where it is recomputed. Summing n bytes sends
                         2 (t - 1) / t n; gathering and scattering under sequence parallelism send the same together.
                         With `parallel.regather` the input is gathered once more.
    pipeline traffic     the stream (by t under sequence parallelism), and the embedding where sub-layers read it,
                         forward, gradients back, for every border; in fp32 with model.residual_fp32, as activations
    data traffic         gradients are scattered, (d - 1) / d of them sent, and weights gathered, if the optimizer
                         is distributed, otherwise gradients are summed; shared weights are summed over their stages
    context traffic      what ranks that share the rows hand over (`row_shares.py`), of the busiest of them
    host traffic         what waits there by `parallel.offload`, both ways
    bubble               (p - 1) / (v m + p - 1) of the pipeline's time, if stages are equally long

Left out: buffers of the allocator, of the kernels and of the network; key/value heads that are copied count as cut in
the activations; the gradients of uncut weights that are summed over t; the sums of Mamba-2's norm, a value per group
and token; what RWKV-6's channel mix exchanges under sequence parallelism; the loss's scalars. FP8 that is emulated
counts as bf16; by Transformer Engine as `fp8_use.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridtron.architecture.base import Parameter
from hybridtron.architecture.table import architecture, parameter_table
from hybridtron.config.layout import chunks_on, data_parallel, layer_costs, stage_layers
from hybridtron.config.resolve import ResolvedPhase, resolve
from hybridtron.config.schema import Config
from hybridtron.planning.activations import ChunkUse, RankUse
from hybridtron.planning.beside_use import with_beside
from hybridtron.planning.count import VALUE_BYTES, gradient_bytes, loss_bytes
from hybridtron.planning.fp8_use import with_fp8
from hybridtron.planning.frozen_use import with_frozen
from hybridtron.planning.layer_use import (
    LayerUse,
    carried_bytes,
    layer_uses,
    runs_again,
    sent_values,
    shared,
    stream_values,
    with_offload,
)
from hybridtron.planning.pipeline import (
    Traffic,
    WeightBytes,
    cached_bytes,
    held_names,
    local_size,
    summed_over_stages,
    turns,
    weight_bytes,
)
from hybridtron.planning.row_shares import sent_by_layers, with_handed_over


@dataclass(frozen=True)
class DeviceMemory:
    """What one process holds while it trains, in bytes."""

    weights: int  # as the forward pass reads them
    gradients: int  # as they are added up
    optimizer: int  # AdamW's two moments, and fp32 master weights where the weights are narrower
    activations: int  # kept for the backward pass by the sub-layers of one micro batch
    logits: int  # as many as the loss makes at a time, and the gradients that it makes of its input and the head
    rounded: int = 0  # weights that FP8 products keep over micro-batches, with `precision.cache_weights`
    states: int = 0  # carried ones: what a step starts from, and what it ends in
    backward: int = 0  # what the backward pass makes and the schedule holds, as far as it is more than the logits

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
    """The phase with the most tokens in one forward pass."""
    return max(resolve(config), key=lambda p: p.settings.micro_batch * p.settings.seq_len * p.chunks_together)


def plan(phase: ResolvedPhase, world_size: int) -> Plan:
    """What every pipeline rank holds and sends in a phase; the configuration is checked for this world size."""
    config = phase.config
    settings = phase.settings
    parallel = config.parallel
    model = config.model
    data = data_parallel(parallel, world_size)
    seq_len = max(one.seq_len for one in config.phases)
    costs = layer_costs(model, seq_len)
    stages = stage_layers(model, parallel, seq_len)
    table = parameter_table(model)
    uses = with_fp8(with_frozen(layer_uses(config, runs_again(phase)), phase, table, stages[0].stop), phase, table)
    step = _Step(
        config=config,
        phase=phase,
        data=data,
        micro_batches=settings.global_batch // (settings.micro_batch * data * phase.chunks_together),
        chunks=tuple(
            PlannedStage(index, stage, sum(costs[stage.start : stage.stop])) for index, stage in enumerate(stages)
        ),
        uses=with_beside(with_handed_over(uses, phase), config),
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
    """What all ranks have in common in an optimizer step."""

    config: Config
    phase: ResolvedPhase
    data: int
    micro_batches: int
    chunks: tuple[PlannedStage, ...]
    uses: tuple[LayerUse, ...]
    carried: dict[int, int]  # bytes of one lane's state, by sub-layer
    handed_over: tuple[int, ...]  # bytes that ranks send for a micro-batch which share its rows, by sub-layer
    table: dict[str, Parameter]
    held: list[list[str]]  # the names in the table that each pipeline rank holds

    @property
    def copies(self) -> int:
        """Ranks that hold the same share of the weights."""
        return self.data * self.config.parallel.context

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation for every token of a micro batch's chunk."""
        return VALUE_BYTES[self.config.precision.name] * self.phase.tokens_of_rank

    def sublayers(self, chunk: PlannedStage) -> tuple[LayerUse, ...]:
        """Those of a chunk."""
        received = sent_values(self.config) if chunk.index else 0
        uses = [self.uses[layer] for layer in chunk.layers]
        if received:  # the first one keeps the stream; the embedding beside it stays, too
            uses[0] = replace(uses[0], kept=uses[0].kept + received - stream_values(self.config))
        return with_offload(uses, self.config.parallel.offload, received)

    def lane_bytes(self, chunk: PlannedStage) -> int:
        """Bytes of one lane's carried state in a chunk of the model."""
        return sum(self.carried.get(layer, 0) for layer in chunk.layers)


def _rank_plan(step: _Step, rank: int) -> RankPlan:
    parallel = step.config.parallel
    chunks = tuple(step.chunks[index] for index in chunks_on(parallel, rank))
    weights = {name: step.table[name] for name in step.held[rank]}
    played = list(turns(parallel, rank, step.micro_batches))
    use = _use(step, rank, chunks)
    activations, backward = use.peak(played)
    held = weight_bytes(step.phase, step.copies, weights)
    return RankPlan(
        rank=rank,
        chunks=chunks,
        parameters=sum(local_size(weight, parallel) for weight in weights.values()),
        in_flight=max(sum(turn.live) for turn in played),
        memory=DeviceMemory(
            weights=held.stored,
            rounded=cached_bytes(step.config, weights),
            gradients=held.gradients,
            optimizer=held.optimizer,
            activations=activations,
            logits=use.logits,
            states=_states(step, chunks),
            backward=backward,
        ),
        traffic=_traffic(step, rank, chunks, held),
    )


def _use(step: _Step, rank: int, chunks: Sequence[PlannedStage]) -> RankUse:
    """What the rank's micro-batches hold."""
    model = step.config.model
    parallel = step.config.parallel
    value = VALUE_BYTES[step.config.precision.name]
    stream = stream_values(step.config)
    is_last = chunks[-1] is step.chunks[-1]
    norms = [0] * (len(chunks) - 1) + [(stream + model.width) * is_last]
    tied = model.tie_embeddings and is_last and parallel.pipeline == 1 and step.phase.learns("embedding.weight")
    return RankUse(
        chunks=tuple(
            ChunkUse(step.sublayers(chunk), norm, step.phase.settings.micro_batch * step.lane_bytes(chunk))
            for chunk, norm in zip(chunks, norms, strict=True)
        ),
        value_bytes=step.value_bytes,
        together=step.phase.chunks_together,
        runs_again=runs_again(step.phase),
        stream=sent_values(step.config),
        width=model.width,
        logits=_logits(step, chunks),
        head_gradient=value * shared(model.vocab_size, parallel.tensor) * model.width if tied else 0,
        rank=rank,
        ranks=parallel.pipeline,
    )


def _logits(step: _Step, chunks: Sequence[PlannedStage]) -> int:
    """Bytes of what the loss makes."""
    if chunks[-1] is not step.chunks[-1]:
        return 0
    model = step.config.model
    tokens = step.phase.tokens_of_rank * step.phase.chunks_together
    vocabulary = shared(model.vocab_size, step.config.parallel.tensor)
    learns = step.phase.learns("embedding.weight" if model.tie_embeddings else "head.weight")
    return loss_bytes(tokens, model.width, vocabulary, VALUE_BYTES[step.config.precision.name], learns)


def _states(step: _Step, chunks: Sequence[PlannedStage]) -> int:
    """Bytes of the states that are carried, old and new."""
    return 2 * step.phase.lanes // step.data * sum(step.lane_bytes(chunk) for chunk in chunks)


def _traffic(step: _Step, rank: int, chunks: Sequence[PlannedStage], held: WeightBytes) -> Traffic:
    parallel = step.config.parallel
    model = step.config.model
    is_first = rank == 0
    is_last = rank == parallel.pipeline - 1
    values = step.value_bytes * step.phase.chunks_together * step.micro_batches
    summed = sum(step.uses[layer].summed for chunk in chunks for layer in chunk.layers)
    gathered = sum(step.uses[layer].gathered for chunk in chunks for layer in chunk.layers)
    if parallel.tensor > 1:  # the embedding's output, and the gradient of the head's input
        summed += (is_first + is_last) * model.width
    if parallel.pipeline > 1:
        borders = 2 * len(chunks) - is_first - is_last
    else:
        borders = 0
    is_tied = model.tie_embeddings and is_first != is_last and step.phase.learns("embedding.weight")
    tied = gradient_bytes(step.config.precision, False) * model.vocab_size * model.width // parallel.tensor
    between_stages = tied * is_tied + summed_over_stages(step.phase, step.table, step.held)
    sharded = parallel.distributed_optimizer
    return Traffic(
        tensor=(parallel.tensor - 1) * (2 * summed + gathered) * values // parallel.tensor,
        pipeline=borders * sent_values(step.config) * values,
        gradients=(1 if sharded else 2) * held.gradients * (step.copies - 1) // step.copies + between_stages,
        parameters=held.learning * (step.copies - 1) // step.copies if sharded else 0,
        context=step.micro_batches * sum(step.handed_over[layer] for chunk in chunks for layer in chunk.layers),
        host=2 * values * sum(layer.away for chunk in chunks for layer in step.sublayers(chunk)),
    )
