"""Activations of a pipeline rank at the peak of a step: an estimate from one number per mixer.

    kept       by a sub-layer from its forward to its backward pass, per token: the norm's input, the norm's output as
               the projections read it, and what the mixer keeps inside (`MixerSpec.activation_values`). Tensor-parallel
               ranks share the inside out, sequence parallelism the norm's input, and `parallel.regather` its output. A
               recomputed sub-layer keeps its norm's input alone.
    frozen     projections that don't learn keep no input, unless an adapter reads it; DoRA keeps the outputs it scales
    received   context-parallel ranks keep the states, keys and values that came from others (`row_shares.py`)
    working    a sub-layer's backward pass holds half as many gradients as the mixer keeps values, by rehearsals of all
               kinds of mixers, and the stream's gradient. Recomputed, it makes the kept values again as well.
    in flight  chunk passes whose backward pass is still to come, at the peak of Megatron's schedule
    offloaded  sub-layers at the start of a stage keep nothing on the device, but the values of two are there at a time

The peak is at the loss, or in the backward pass of the sub-layer that makes most, whichever is more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridtron.architecture.adapters import adapter_key, is_adaptable
from hybridtron.architecture.base import MixerSpec, ModelSizes, Parameter
from hybridtron.architecture.table import architecture
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, ParallelConfig, Recompute
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES

MARGIN = 0.1
"""Relative error of the planned memory: a rehearsed peak of a gigabyte or more is within it."""


@dataclass(frozen=True)
class SublayerUse:
    """Activations of one sub-layer on one device, in values per token of the type that is computed in."""

    kept: int  # from the forward to the backward pass
    working: int  # besides, while its backward pass runs
    offloaded: int = 0  # in the host's memory, instead of kept

    def with_more(self, values: int, is_recomputed: bool) -> SublayerUse:
        """Return a sub-layer whose forward pass keeps this many values more."""
        if is_recomputed:
            return replace(self, working=self.working + values)
        return replace(self, kept=self.kept + values)


def sublayer_uses(config: Config) -> tuple[SublayerUse, ...]:
    """Return the activations of each sub-layer of the model."""
    arch = architecture(config.model)
    wide = FP32_BYTES // VALUE_BYTES[config.precision.name]
    sizes = replace(arch.sizes, wide=wide, tensor=config.parallel.tensor)
    by_letter = {letter: _sublayer_use(spec, sizes, config) for letter, spec in arch.by_letter.items()}
    return tuple(by_letter[letter] for letter in arch.letters)


def _sublayer_use(spec: MixerSpec, sizes: ModelSizes, config: Config) -> SublayerUse:
    parallel = config.parallel
    regathers = gathers_again(spec, config)
    stream = stream_values(config) * (1 + spec.feeds_next)
    normed = shared(spec.input_width(sizes), parallel.tensor if regathers else 1)
    if spec.beside:
        stream = 0
        if regathers or not parallel.sequence:
            normed = 0  # kept by the sub-layer before it, unless each gathers it for itself
    inside = shared(spec.activation_values(sizes), parallel.tensor)
    gradients = stream + inside // 2
    if not is_recomputed(spec, sizes, parallel.recompute):
        return SublayerUse(kept=stream + normed + inside, working=gradients)
    start = stream or shared(sizes.width, parallel.tensor if parallel.sequence else 1)
    return SublayerUse(kept=start, working=normed + inside + gradients)


def with_frozen(
    uses: Sequence[SublayerUse], phase: ResolvedPhase, table: Mapping[str, Parameter]
) -> tuple[SublayerUse, ...]:
    """Take off the inputs of frozen projections, and add the outputs that DoRA scales."""
    if phase.trained is None:
        return tuple(uses)
    arch = architecture(phase.model)
    recompute = phase.config.parallel.recompute
    return tuple(
        use.with_more(_adapted_values(layer, phase, table), is_recomputed(arch.specs[layer], arch.sizes, recompute))
        for layer, use in enumerate(uses)
    )


def _adapted_values(layer: int, phase: ResolvedPhase, table: Mapping[str, Parameter]) -> int:
    """Return the difference in kept values per token to a sub-layer whose projections all learn."""
    arch = architecture(phase.model)
    adapters = phase.model.adapters
    parallel = phase.config.parallel
    more = 0
    reads_input = False
    for name, weight in arch.mixer_weights(layer).items():
        if not is_adaptable(weight):
            continue
        is_adapted = adapter_key(name, "A") in table
        keeps_input = is_adapted or phase.learns(name)
        reads_inside = any(cut.axis == 1 for cut in weight.cuts)
        if reads_inside and not keeps_input:
            more -= shared(weight.shape[1], parallel.tensor)
        elif keeps_input and not reads_inside:
            reads_input = True
        if is_adapted and adapters is not None and adapters.dora:
            more += weight.share_shape(parallel.mesh_sizes)[0]
    spec = arch.specs[layer]
    if not reads_input and not spec.beside:
        more -= shared(spec.input_width(arch.sizes), parallel.tensor if gathers_again(spec, phase.config) else 1)
    return more


def with_offload(uses: Sequence[SublayerUse], count: int, received: int) -> tuple[SublayerUse, ...]:
    """Offload the first sub-layers of a stage, but for the stream that the stage received."""
    stays = [received, *[0] * len(uses)]
    offloaded = [
        replace(use, kept=stay, offloaded=max(0, use.kept - stay))
        for use, stay in zip(uses[:count], stays, strict=False)
    ]
    return (*offloaded, *uses[count:])


def working_values(uses: Sequence[SublayerUse]) -> int:
    """Return the values per token that a chunk's passes hold at most, beyond those kept."""
    before = [0, *(use.offloaded for use in uses)]
    return max(use.working + use.offloaded + earlier for use, earlier in zip(uses, before, strict=False))


def held_micro_batches(parallel: ParallelConfig, rank: int, micro_batches: int) -> Iterator[tuple[int, ...]]:
    """Yield the micro-batches that a rank holds of each virtual stage, after every forward pass of the schedule."""
    pipeline = parallel.pipeline
    stages = parallel.virtual_pipeline
    micro_batches = min(micro_batches, 4 * pipeline)  # a few rounds of all stages show the peak
    total = micro_batches * stages
    # 1F1B: a rank runs forward until the first micro-batch has come back from the last rank, p - rank - 1 passes, and
    # then one forward for each backward. Interleaved, micro-batches pass each virtual stage in groups of p: the first
    # comes back after all stages but the last have run forward for a group, and the way to the last rank and back
    # takes two passes for each rank in between.
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
    """Return True if the backward pass runs a sub-layer again; mixers along the sequence are those with a state."""
    return recompute == Recompute.layer or (recompute == Recompute.selective and bool(spec.state_parts(sizes)))


def chunks_run_again(phase: ResolvedPhase) -> bool:
    """Return True if the chunks of a lane, run through time, run again in the backward pass, one at a time."""
    return phase.chunks_together > 1 and phase.config.parallel.recompute != Recompute.none


def hides_traffic(spec: MixerSpec, config: Config) -> bool:
    """Return True if exchanges for the gradient of a mixer's input run beside products (`parallel/entered.py`)."""
    own_products = not config.parallel.transformer_engine and config.precision.name not in FP8_MULTIPLES
    return config.parallel.tensor > 1 and spec.projects_input and own_products


def gathers_again(spec: MixerSpec, config: Config) -> bool:
    """Return True if a mixer keeps its rank's share of its input, and gathers the tokens again in the backward pass."""
    return config.parallel.sequence and config.parallel.regather and hides_traffic(spec, config)


def stream_values(config: Config) -> int:
    """Return the values per token of the residual stream on one device; an fp32 one beside bf16 counts twice."""
    width = shared(config.model.width, config.parallel.tensor if config.parallel.sequence else 1)
    if config.model.residual_fp32:
        return width * FP32_BYTES // VALUE_BYTES[config.precision.name]
    return width


def sent_values(config: Config) -> int:
    """Return the values per token that a stage sends on: the stream, and the embedding if later sub-layers read it."""
    return stream_values(config) * (1 + architecture(config.model).carries_embedding)


def shared(amount: int, ranks: int) -> int:
    """Return the share of the fullest of `ranks` ranks."""
    return -(-amount // ranks)
