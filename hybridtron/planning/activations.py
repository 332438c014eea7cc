"""Estimate of the activation memory that a pipeline rank needs at the peak of a training step.

A sub-layer is a norm, a mixer (a scan, attention or an MLP) and the addition to the residual stream. The estimate
counts elements per token:

    kept       elements that a sub-layer saves in its forward pass for its backward pass: the norm's input, the norm's
               output, and elements inside the mixer (`MixerSpec.activation_values`). Tensor-parallel ranks divide the
               elements inside the mixer. With sequence parallelism they also divide the norm's input. With
               `parallel.regather` they also divide the norm's output. A recomputed sub-layer saves only the norm's
               input.
    frozen     a frozen projection does not save its input, unless an adapter reads the same input. DoRA (adapters that
               also learn each weight row's norm) saves the outputs that it scales.
    received   context-parallel ranks save the states, keys and values that other ranks sent (`context_traffic.py`)
    working    elements that exist only while a sub-layer's backward pass runs: the residual stream's gradient, and
               gradients inside the mixer. The gradients inside the mixer are estimated as half of the elements that
               the mixer saves. Rehearsals of all kinds of mixers gave this ratio. In a recomputed sub-layer, the
               recomputed elements are working elements.
    offloaded  with `parallel.offload`, a stage's first sub-layers save their elements in host memory. The device then
               holds the elements of at most two of these sub-layers at a time.

A micro-batch is in flight while it waits for its backward pass. Megatron's pipeline schedule determines how many
micro-batches are in flight at the peak. The peak is either at the loss, or in the backward pass of the sub-layer that
needs the most memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from hybridtron.architecture.adapters import adapter_key
from hybridtron.architecture.base import MixerSpec, ModelSizes, Parameter
from hybridtron.architecture.moe import MoESpec
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, ParallelConfig, Recompute
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES

MARGIN = 0.1
"""Maximum relative error of the estimate, if the peak in `hybridtron rehearse` is at least `MARGIN_FROM`."""

MARGIN_FROM = 1e9
"""Smallest peak in bytes to which `MARGIN` applies. In smaller models, buffers of single kernels decide the peak."""


@dataclass(frozen=True)
class SublayerUse:
    """One sub-layer's activations on one device, in elements per token.

    An element has the dtype of the precision. With bf16, an fp32 element counts as two elements.

    kept: elements on the device, from the forward to the backward pass
    working: additional elements on the device while the sub-layer's backward pass runs
    offloaded: elements in host memory, from the forward to the backward pass
    """

    kept: int
    working: int
    offloaded: int = 0

    def with_more(self, values: int, is_recomputed: bool) -> SublayerUse:
        """Return a copy with `values` more elements: working if the sub-layer is recomputed, else kept."""
        if is_recomputed:
            return replace(self, working=self.working + values)
        return replace(self, kept=self.kept + values)


def sublayer_uses(phase: ResolvedPhase) -> tuple[SublayerUse, ...]:
    """Return every sub-layer's activations, without the effects that frozen weights and context parallelism have.

    `with_frozen` and `with_received` add these effects.
    """
    arch = phase.arch
    config = phase.config
    wide = FP32_BYTES // VALUE_BYTES[config.precision.name]
    sizes = replace(arch.sizes, wide=wide, tensor=config.parallel.tensor)
    by_letter = {letter: _sublayer_use(spec, sizes, config) for letter, spec in arch.by_letter.items()}
    return tuple(by_letter[letter] for letter in arch.letters)


def _sublayer_use(spec: MixerSpec, sizes: ModelSizes, config: Config) -> SublayerUse:
    parallel = config.parallel
    regathers = gathers_again(spec, config)
    stream = stream_values(config) * (1 + spec.feeds_next)
    normed = shared(spec.input_width(sizes), parallel.tensor if regathers else 1)
    if spec.beside:  # the sub-layer reads the previous sub-layer's normed input
        stream = 0
        if regathers or not parallel.sequence:
            normed = 0  # counted in the previous sub-layer, since both save the same tensor
    if parallel.expert_tensor_ranks < parallel.tensor and isinstance(spec, MoESpec):
        sizes = replace(sizes, tensor=1)  # each rank routes only its own tokens
    inside = shared(spec.activation_values(sizes), parallel.tensor)
    gradients = stream + inside // 2
    if not is_recomputed(spec, sizes, parallel.recompute):
        return SublayerUse(kept=stream + normed + inside, working=gradients)
    start = stream or shared(sizes.width, parallel.tensor if parallel.sequence else 1)
    return SublayerUse(kept=start, working=normed + inside + gradients)


def with_frozen(
    uses: Sequence[SublayerUse], phase: ResolvedPhase, table: Mapping[str, Parameter]
) -> tuple[SublayerUse, ...]:
    """Return `uses` without the inputs to frozen projections, and with the outputs that DoRA saves."""
    if phase.trained is None:
        return tuple(uses)
    arch = phase.arch
    recompute = phase.config.parallel.recompute
    return tuple(
        use.with_more(_adapted_values(layer, phase, table), is_recomputed(arch.specs[layer], arch.sizes, recompute))
        for layer, use in enumerate(uses)
    )


def _adapted_values(layer: int, phase: ResolvedPhase, table: Mapping[str, Parameter]) -> int:
    """Return the change in a sub-layer's kept elements per token, compared with learning all projections.

    Frozen projections decrease the number, and adapters increase it.
    """
    arch = phase.arch
    adapters = phase.model.adapters
    parallel = phase.config.parallel
    more = 0
    reads_input = False
    is_input_adapted = False
    for name, weight in arch.mixer_weights(layer).items():
        if not weight.is_mixer_projection:
            continue
        is_adapted = adapter_key(name, "A") in table
        keeps_input = is_adapted or phase.learns(name)
        reads_inside = not reads_mixer_input(weight)
        if reads_inside and not keeps_input:
            more -= shared(weight.shape[1], parallel.tensor if is_row_parallel(weight) else 1)
        elif keeps_input and not reads_inside:
            reads_input = True
            is_input_adapted = is_input_adapted or is_adapted
        if is_adapted and adapters is not None and adapters.dora:
            more += weight.shard_shape(parallel.mesh_sizes)[0]
    spec = arch.specs[layer]
    if is_input_adapted and gathers_again(spec, phase.config):  # adapters save the gathered input, with all tokens
        kept = 0 if spec.beside else shared(spec.input_width(arch.sizes), parallel.tensor)
        more += spec.input_width(arch.sizes) - kept
    if not reads_input and not spec.beside:
        more -= shared(spec.input_width(arch.sizes), parallel.tensor if gathers_again(spec, phase.config) else 1)
    return more


def uses_slots(spec: MoESpec, phase: ResolvedPhase) -> bool:
    """Return whether ranks exchange slots. A capacity fixes their number, which does not depend on expert loads."""
    parallel = phase.config.parallel
    return spec.capacity is not None and parallel.expert > 1 and parallel.routes_full_rows


def rows_per_token(spec: MoESpec, phase: ResolvedPhase) -> Fraction:
    """Return how many rows a rank sends to experts for each of its tokens: slots, or choices."""
    if uses_slots(spec, phase):
        return spec.slots_per_token(phase.settings.seq_len)
    return Fraction(spec.top_k)


def loads_change_memory(phase: ResolvedPhase) -> bool:
    """Return whether a rank's memory depends on the loads of experts."""
    specs = [spec for spec in phase.arch.specs if isinstance(spec, MoESpec)]
    return phase.config.parallel.expert > 1 and not all(uses_slots(spec, phase) for spec in specs)


def row_use(spec: MoESpec, phase: ResolvedPhase) -> SublayerUse:
    """Return the elements needed for one row on the rank whose experts compute the row.

    The rank saves the input and the inner channels of each row, and its passes hold a row's input and output twice.
    With slots, it also saves the outputs that other ranks return to it.
    """
    outer = spec.outer(phase.arch.sizes)
    inner = shared((spec.matrices + 1) * spec.hidden, phase.config.parallel.expert_tensor_ranks)
    saved_outputs = outer if uses_slots(spec, phase) else 0
    return SublayerUse(kept=outer + inner + saved_outputs, working=2 * outer + inner // 2)


def even_rows_per_token(spec: MoESpec, phase: ResolvedPhase) -> float:
    """Return how many rows a rank's experts get for each token of the rank, with even loads and without slots."""
    parallel = phase.config.parallel
    sharing = parallel.tensor // parallel.expert_tensor_ranks  # ranks that route different tokens of the same row
    return spec.top_k / sharing


def even_rows_gib(spec: MoESpec, phase: ResolvedPhase) -> float:
    """Return the GiB that the rows of a micro-batch need in a layer during its backward pass, with even loads.

    If a forward pass runs several chunks per row, the rows of all chunks are saved, unless the chunks run again.
    """
    use = row_use(spec, phase)
    rows = phase.tokens_of_rank * even_rows_per_token(spec, phase)
    saved_chunks = 1 if chunks_run_again(phase) else phase.chunks_together
    return rows * (saved_chunks * use.kept + use.working) * VALUE_BYTES[phase.precision.name] / 2**30


def with_rows(uses: Sequence[SublayerUse], phase: ResolvedPhase, imbalance: float) -> tuple[SublayerUse, ...]:
    """Return `uses` corrected for the rows that a rank's experts get; `uses` has one row for each choice of the rank.

    imbalance: rows that the experts get, divided by the rows that they would get with even loads; slots do not depend
        on it
    """
    changed = []
    for use, spec in zip(uses, phase.arch.specs, strict=True):
        if isinstance(spec, MoESpec):
            if uses_slots(spec, phase):
                rows = float(rows_per_token(spec, phase) - spec.top_k)
            else:
                rows = (imbalance - 1.0) * even_rows_per_token(spec, phase)
            row = row_use(spec, phase)
            again = is_recomputed(spec, phase.arch.sizes, phase.config.parallel.recompute)
            use = use.with_more(round(rows * row.kept), again)
            use = use.with_more(round(rows * row.working), True)
        changed.append(use)
    return tuple(changed)


def with_offload(uses: Sequence[SublayerUse], count: int, received: int) -> tuple[SublayerUse, ...]:
    """Return a stage's uses after offloading the first `count` sub-layers.

    received: elements per token in the residual stream that the previous stage sent; they stay on the device
    """
    stays = [received, *[0] * len(uses)]
    offloaded = [
        replace(use, kept=stay, offloaded=max(0, use.kept - stay))
        for use, stay in zip(uses[:count], stays, strict=False)
    ]
    return (*offloaded, *uses[count:])


def working_values(uses: Sequence[SublayerUse]) -> int:
    """Return the largest number of elements per token that a stage needs in addition to the kept elements.

    The maximum is over the sub-layers' passes. The device holds the elements of an offloaded sub-layer and of the
    sub-layer before it at the same time.
    """
    before = [0, *(use.offloaded for use in uses)]
    return max(use.working + use.offloaded + earlier for use, earlier in zip(uses, before, strict=False))


def held_micro_batches(parallel: ParallelConfig, rank: int, micro_batches: int) -> Iterator[tuple[int, ...]]:
    """Yield, after each forward pass on a rank, how many micro-batches each virtual stage has in flight."""
    pipeline = parallel.pipeline
    stages = parallel.virtual_pipeline
    micro_batches = min(micro_batches, 4 * pipeline)  # the peak occurs within this number of micro-batches
    total = micro_batches * stages
    # The schedule is 1F1B: warm-up forward passes, then one backward pass after each forward pass. With p pipeline
    # ranks and one stage per rank, the warm-up has p - rank - 1 forward passes. With v virtual stages per rank the
    # schedule is interleaved: p micro-batches run through a virtual stage, then through the next virtual stage. The
    # warm-up is then (v - 1) p forward passes for all virtual stages but the last, and 2 (p - rank - 1) forward passes
    # until the first gradient arrives from the last rank.
    warm_up = pipeline - rank - 1
    if stages > 1:
        warm_up = 2 * warm_up + (stages - 1) * pipeline
    live = [0] * stages
    for step in range(total):
        live[step // pipeline % stages] += 1
        yield tuple(live)
        if step >= warm_up:
            live[stages - 1 - (step - warm_up) // pipeline % stages] -= 1


def is_recomputed(spec: MixerSpec, sizes: ModelSizes, recompute: Recompute) -> bool:
    """Return whether the backward pass runs a sub-layer's forward pass again.

    `parallel.recompute=layer` recomputes all sub-layers, `selective` recomputes sub-layers that have a state
    (recurrences and attention), and `none` recomputes no sub-layer.
    """
    return recompute == Recompute.layer or (recompute == Recompute.selective and bool(spec.state_parts(sizes)))


def chunks_run_again(phase: ResolvedPhase) -> bool:
    """Return True if a forward pass runs several chunks per row, and the backward pass recomputes each chunk.

    This is the case with `states.through_time` (backpropagation through a step's chunks) and recomputation.
    """
    return phase.chunks_together > 1 and phase.config.parallel.recompute != Recompute.none


def hides_traffic(spec: MixerSpec, config: Config) -> bool:
    """Return whether the mixer's input gradient is reduced while matrix multiplications run.

    `parallel/overlapped_linear.py` implements the overlap, for projections that use neither FP8 nor Transformer Engine.
    """
    is_supported = not config.parallel.transformer_engine and config.precision.name not in FP8_MULTIPLES
    return config.parallel.tensor > 1 and spec.projects_input and is_supported


def gathers_again(spec: MixerSpec, config: Config) -> bool:
    """Return whether a rank saves only its own tokens of a mixer's input, and all-gathers the input in backward."""
    return config.parallel.sequence and config.parallel.regather and hides_traffic(spec, config)


def gathers_in_backward(layer: int, phase: ResolvedPhase) -> bool:
    """Return whether a sub-layer all-gathers its input a second time, in the backward pass.

    The weight gradients of the input projections need the gathered input. So it is not gathered if all of these
    projections are frozen, or if adapters have saved the gathered input.
    """
    if not gathers_again(phase.arch.specs[layer], phase.config):
        return False
    weights = phase.arch.mixer_weights(layer)
    names = [name for name, weight in weights.items() if weight.is_mixer_projection and reads_mixer_input(weight)]
    if any(adapter_key(name, "A") in phase.table for name in names):
        return False
    return any(phase.learns(name) for name in names)


def reads_mixer_input(weight: Parameter) -> bool:
    """Return True if a projection reads the mixer's input, not a tensor that the mixer computes from it."""
    return not is_row_parallel(weight) and not weight.inner


def is_row_parallel(weight: Parameter) -> bool:
    """Return whether tensor-parallel ranks divide a projection's input channels, instead of its output channels."""
    last = len(weight.shape) - 1
    return last > 0 and any(cut.axis == last for cut in weight.cuts)


def stream_values(config: Config) -> int:
    """Return the residual stream's elements per token on one device; with bf16, an fp32 element counts twice."""
    width = shared(config.model.width, config.parallel.tensor if config.parallel.sequence else 1)
    if config.model.residual_fp32:
        return width * FP32_BYTES // VALUE_BYTES[config.precision.name]
    return width


def sent_values(phase: ResolvedPhase) -> int:
    """Return the elements per token that a pipeline stage sends to the next stage.

    They are the residual stream, and the embedding if later sub-layers read it.
    """
    return stream_values(phase.config) * (1 + phase.arch.carries_embedding)


def shared(amount: int, ranks: int) -> int:
    """Return the amount divided by the number of ranks, rounded up."""
    return -(-amount // ranks)
