"""Estimate of each pipeline rank's memory and traffic in a parallel layout, from the configuration alone.

With t tensor-parallel ranks, p pipeline ranks with v virtual stages each, and m micro-batches per step:

    weights, gradients   The weights in the rank's stages. Tensor-parallel ranks divide most weights (`Parameter.cuts`).
                         Gradients have the dtype that `precision.gradients` selects. Frozen weights have neither
                         gradients nor optimizer states. An embedding that is tied to the head is on both the first and
                         the last pipeline rank.
    optimizer            Moments in the dtype that `precision.moments` selects; fp32 master weights, if weights have a
                         narrower dtype; and the moving average of `run.ema` in fp32. A distributed optimizer divides
                         all of them among the data- and context-parallel ranks, and those of experts among the ranks
                         that have the same experts.
    activations          Saved by the forward passes for all micro-batches in flight (`activations.py`). With
                         `states.through_time`, one pass runs several chunks per row, one after another, and saves the
                         activations of all chunks. With recomputation, the pass saves only each chunk's input and
                         initial states; the activations of one chunk are added, since each chunk is recomputed later.
    logits               On the last pipeline rank: the logits that the loss computes at a time, and the gradients of
                         the head's weight and of its input. Tensor-parallel ranks divide the logits and the weight.
    backward             Working memory in one sub-layer's backward pass, if it is larger than the logits' memory; only
                         the difference counts, because logits and working memory do not exist at the same time.
    states               Recurrent states that are carried between steps. Both the states before a step and the states
                         after it exist until the step is accepted.
    traffic              Bytes that a device sends in a step (`traffic.py`).
    bubble               Fraction of the time in which a pipeline rank waits: (p - 1) / (v m + p - 1), if all stages
                         take equally long.

The total is within `activations.MARGIN` of the peak that `hybridtron rehearse` counts. It includes neither the buffers
that the allocator, the kernels and the network use, nor the inputs that FP8 matrix multiplications save in one byte per
element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridtron.architecture.base import Parameter
from hybridtron.config.pipeline_layout import chunks_on, data_parallel, layer_costs, stage_layers
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.schema import Config
from hybridtron.planning.activations import (
    SublayerUse,
    chunks_run_again,
    held_micro_batches,
    loads_change_memory,
    sent_values,
    shared,
    stream_values,
    sublayer_uses,
    with_frozen,
    with_offload,
    with_rows,
    working_values,
)
from hybridtron.planning.context_traffic import sent_by_layers, with_received
from hybridtron.planning.count import VALUE_BYTES, gradient_bytes, loss_bytes
from hybridtron.planning.states import carried_bytes
from hybridtron.planning.traffic import Traffic, exchanged_rows, exchanged_values, summed_over_stages
from hybridtron.planning.weights import (
    WeightBytes,
    cached_bytes,
    copies_of,
    local_size,
    weight_bytes,
    weights_by_rank,
)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that one device needs at the peak of a training step."""

    weights: int  # in the dtype that the forward pass reads
    gradients: int  # in the dtype in which micro-batches are accumulated
    optimizer: int  # moments, fp32 master weights and their moving average
    activations: int  # saved for the backward pass, for all micro-batches in flight
    logits: int  # logits that the loss computes at a time, with the gradients of the head's weight and input
    rounded: int = 0  # copies of weights in FP8, with `precision.cache_weights`
    states: int = 0  # carried states before and after a step
    backward: int = 0  # working memory of one sub-layer's backward pass, minus `logits`

    @property
    def total(self) -> int:
        """Sum over all fields."""
        kept = self.activations + self.logits + self.states
        return self.weights + self.rounded + self.gradients + self.optimizer + kept + self.backward


@dataclass(frozen=True)
class PlannedStage:
    """A pipeline stage: consecutive sub-layers on one rank.

    index: the stage's number in the model, from 0
    layers: indices of the stage's sub-layers
    forward_cost: estimated forward cost of these sub-layers per token (`config/pipeline_layout.py`)
    """

    index: int
    layers: range
    forward_cost: int


@dataclass(frozen=True)
class RankPlan:
    """Estimates for one pipeline rank.

    rank: the rank's index in its pipeline. All devices with this index have equal estimates.
    chunks: the rank's virtual stages
    parameters: how many parameters one device has
    in_flight: how many micro-batches have saved activations at the peak, summed over the rank's stages
    """

    rank: int
    chunks: tuple[PlannedStage, ...]
    parameters: int
    in_flight: int
    memory: DeviceMemory
    traffic: Traffic


@dataclass(frozen=True)
class Plan:
    """Estimates for a parallel layout in one phase."""

    world_size: int
    data: int  # data-parallel ranks
    micro_batches: int  # per data-parallel rank and step
    bubble: float  # fraction of the time in which a pipeline rank waits
    ranks: tuple[RankPlan, ...]

    @property
    def fullest(self) -> RankPlan:
        """The pipeline rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.memory.total)


def largest_phase(run_plan: RunPlan) -> ResolvedPhase:
    """Return the phase with the most tokens in one forward pass."""
    return max(run_plan.phases, key=lambda p: p.settings.micro_batch * p.settings.seq_len * p.chunks_together)


def fullest_phase(run_plan: RunPlan, world_size: int) -> tuple[ResolvedPhase, Plan]:
    """Return the phase that needs the most memory on a device, and its plan.

    This need not be the phase with the most tokens, if phases have different optimizers or train different weights.
    """
    planned = [(phase, plan(phase, world_size)) for phase in run_plan.phases]
    return max(planned, key=lambda pair: pair[1].fullest.memory.total)


def imbalance_that_fits(phase: ResolvedPhase, world_size: int, memory_bytes: float) -> float | None:
    """Return the largest imbalance of expert loads with which a rank fits into memory, rounded down to hundredths.

    The imbalance is the rows that a rank's experts get, divided by the rows that they would get with even loads. The
    result is 0 if a rank does not fit with even loads. It is None if a rank fits even when its experts get all rows, or
    if its memory does not depend on loads.
    """
    most = phase.config.parallel.expert

    def fits(imbalance: float) -> bool:
        return plan(phase, world_size, imbalance).fullest.memory.total <= memory_bytes

    if not loads_change_memory(phase) or fits(most):
        return None
    if not fits(1.0):
        return 0.0
    low = 100
    high = 100 * most
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle / 100):
            low = middle
        else:
            high = middle
    return low / 100


def imbalance_line(most: float, phase: ResolvedPhase, world_size: int, memory_bytes: float) -> str:
    """Return a sentence about the largest loads of experts with which a rank fits into memory.

    most: the result of `imbalance_that_fits`
    """
    ranks = phase.config.parallel.expert
    every = plan(phase, world_size, float(ranks)).fullest.memory.total / 1e9
    limit = f"{memory_bytes / 1e9:.0f} GB"
    if most < 1:
        even = plan(phase, world_size).fullest.memory.total / 1e9
        return (
            f"By the plan a rank does not fit in {limit} even if the loads of experts are even: it needs {even:.1f} GB."
        )
    return (
        f"By the plan a rank fits in {limit} up to {most:.2f} times the tokens of even loads; with {ranks} times, "
        f"which are all tokens, it needs {every:.1f} GB."
    )


def plan(phase: ResolvedPhase, world_size: int, imbalance: float = 1.0) -> Plan:
    """Estimate every pipeline rank's memory and traffic in a phase.

    world_size: number of devices, for which the configuration must be valid
    imbalance: rows that a rank's experts get, divided by the rows that they would get with even loads; only memory
        depends on it
    """
    config = phase.config
    settings = phase.settings
    parallel = config.parallel
    data = data_parallel(parallel, world_size)
    seq_len = max(phase_settings.seq_len for phase_settings in config.phases)
    costs = layer_costs(phase.arch, seq_len)
    stages = stage_layers(phase.arch, parallel, seq_len)
    table = phase.table
    step = _Step(
        config=config,
        phase=phase,
        data=data,
        micro_batches=settings.global_batch // (settings.micro_batch * data * phase.chunks_together),
        chunks=tuple(
            PlannedStage(index, stage, sum(costs[stage.start : stage.stop])) for index, stage in enumerate(stages)
        ),
        uses=with_rows(with_received(with_frozen(sublayer_uses(phase), phase, table), phase), phase, imbalance),
        exchanged=exchanged_values(phase),
        exchanged_rows=exchanged_rows(phase),
        carried=carried_bytes(phase),
        handed_over=sent_by_layers(phase),
        table=table,
        weights_by_rank=weights_by_rank(table, phase.arch.letters, stages, parallel.pipeline),
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
    """Inputs that the estimates for all pipeline ranks have in common."""

    config: Config
    phase: ResolvedPhase
    data: int
    micro_batches: int
    chunks: tuple[PlannedStage, ...]
    uses: tuple[SublayerUse, ...]
    exchanged: tuple[int, ...]  # elements per token that tensor-parallel ranks exchange, by sub-layer
    exchanged_rows: tuple[int, ...]  # elements per token that ranks which divide experts send, by sub-layer
    carried: dict[int, int]  # bytes of the state that one row carries, by sub-layer
    handed_over: tuple[int, ...]  # bytes that a context-parallel rank sends in a micro-batch, by sub-layer
    table: Mapping[str, Parameter]
    weights_by_rank: list[list[str]]  # for each pipeline rank, the names of its weights

    @property
    def value_bytes(self) -> int:
        """Bytes of a tensor with one element for each token that a rank has in one pass."""
        return VALUE_BYTES[self.config.precision.name] * self.phase.tokens_of_rank

    def sublayers(self, chunk: PlannedStage) -> tuple[SublayerUse, ...]:
        """Return the activations of a stage's sub-layers, after offloading."""
        received = sent_values(self.phase) * (chunk.index > 0)
        uses = [self.uses[layer] for layer in chunk.layers]
        return with_offload(uses, self.config.parallel.offload, received)

    def lane_bytes(self, chunk: PlannedStage) -> int:
        """Return the bytes of the state that one row carries in a stage's sub-layers."""
        return sum(self.carried.get(layer, 0) for layer in chunk.layers)


def _rank_plan(step: _Step, rank: int) -> RankPlan:
    parallel = step.config.parallel
    chunks = tuple(step.chunks[index] for index in chunks_on(parallel, rank))
    weights = {name: step.table[name] for name in step.weights_by_rank[rank]}
    bytes_of_chunks = [_kept(step, chunk) for chunk in chunks]
    in_flight = max(
        held_micro_batches(parallel, rank, step.micro_batches),
        key=lambda counts: sum(number * size for number, size in zip(counts, bytes_of_chunks, strict=True)),
    )
    resident = weight_bytes(step.phase, copies_of(parallel, step.data), weights)
    logits = _logits(step, chunks)
    return RankPlan(
        rank=rank,
        chunks=chunks,
        parameters=sum(local_size(weight, parallel) for weight in weights.values()),
        in_flight=sum(in_flight),
        memory=DeviceMemory(
            weights=resident.stored,
            rounded=cached_bytes(step.phase, weights),
            gradients=resident.gradients,
            optimizer=resident.optimizer,
            activations=sum(number * size for number, size in zip(in_flight, bytes_of_chunks, strict=True)),
            logits=logits,
            states=2 * step.phase.lanes // step.data * sum(step.lane_bytes(chunk) for chunk in chunks),
            backward=_streams(step, rank) + max(0, *(_working(step, chunk) - logits for chunk in chunks)),
        ),
        traffic=_traffic(step, rank, chunks, resident),
    )


def _kept(step: _Step, chunk: PlannedStage) -> int:
    """Return the bytes that a stage saves per micro-batch, from its forward to its backward pass."""
    together = step.phase.chunks_together
    is_last = chunk is step.chunks[-1]
    if chunks_run_again(step.phase):  # save each chunk's input and initial states; the last stage also saves its output
        between = sent_values(step.phase) + step.config.model.width * is_last
        states = step.phase.settings.micro_batch * step.lane_bytes(chunk)
        return (between * step.value_bytes + states) * together
    last_norm = (stream_values(step.config) + step.config.model.width) * is_last
    return (sum(use.kept for use in step.sublayers(chunk)) + last_norm) * step.value_bytes * together


def _working(step: _Step, chunk: PlannedStage) -> int:
    """Return the most bytes that a stage's passes need in addition to `_kept`."""
    uses = step.sublayers(chunk)
    values = working_values(uses)
    if chunks_run_again(step.phase):
        values += sum(use.kept for use in uses)
    return values * step.value_bytes


def _streams(step: _Step, rank: int) -> int:
    """Return the bytes that residual streams take in the pipeline schedule's buffers.

    Every rank but the first has a received stream and its gradient. With virtual stages, a rank also has a sent stream
    and its gradient.
    """
    num_streams = 2 * (rank > 0) + 2 * (step.config.parallel.virtual_pipeline > 1)
    return num_streams * sent_values(step.phase) * step.value_bytes * step.phase.chunks_together


def _logits(step: _Step, chunks: Sequence[PlannedStage]) -> int:
    """Return the bytes for logits and for the loss's gradients; 0 on every pipeline rank but the last."""
    if chunks[-1] is not step.chunks[-1]:
        return 0
    model = step.config.model
    tokens = step.phase.tokens_of_rank * step.phase.chunks_together
    vocabulary = shared(model.vocab_size, step.config.parallel.tensor)
    learns = step.phase.learns("embedding.weight" if model.tie_embeddings else "head.weight")
    return loss_bytes(tokens, model.width, vocabulary, VALUE_BYTES[step.config.precision.name], learns)


def _traffic(step: _Step, rank: int, chunks: Sequence[PlannedStage], resident: WeightBytes) -> Traffic:
    parallel = step.config.parallel
    model = step.config.model
    is_first = rank == 0
    is_last = rank == parallel.pipeline - 1
    layers = [layer for chunk in chunks for layer in chunk.layers]
    values = step.value_bytes * step.phase.chunks_together * step.micro_batches
    # tensor-parallel ranks also all-reduce the embedding's output and the gradient of the head's input
    exchanged = sum(step.exchanged[layer] for layer in layers) + 2 * (is_first + is_last) * model.width
    num_boundaries = 0
    if parallel.pipeline > 1:
        num_boundaries = 2 * len(chunks) - is_first - is_last
    is_tied = model.tie_embeddings and is_first != is_last and step.phase.learns("embedding.weight")
    tied = gradient_bytes(step.config.precision, False) * model.vocab_size * model.width // parallel.tensor
    between_stages = tied * is_tied + summed_over_stages(step.phase, step.table, step.weights_by_rank)
    sharded = parallel.distributed_optimizer
    return Traffic(
        tensor=(parallel.tensor - 1) * exchanged * values // parallel.tensor,
        pipeline=num_boundaries * sent_values(step.phase) * values,
        gradients=(1 if sharded else 2) * resident.sent_gradients + between_stages,
        parameters=resident.sent_weights if sharded else 0,
        context=step.micro_batches * sum(step.handed_over[layer] for layer in layers),
        experts=values * sum(step.exchanged_rows[layer] for layer in layers),
        host=2 * values * sum(use.offloaded for chunk in chunks for use in step.sublayers(chunk)),
    )
