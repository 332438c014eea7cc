"""What sub-layers do not keep where weights are frozen, and what adapters keep beside them.

an input      of products is kept for the gradients of their weights. Where all that read it are frozen, it is gone,
              unless an op keeps it for itself (`keeps_output`) or an adapter reads it
an adapter    keeps what A makes of its input; with DoRA the outputs too, which it scales. What enters a mixer is not
              gathered again for it
at the start  sub-layers before the first weight that learns have no backward pass
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridtron.architecture.base import Parameter
from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.planning.layer_use import LayerUse, passes_of, runs_again, shared
from hybridtron.planning.projections import SublayerWeights, WeightUse, projections_of


def with_frozen(
    uses: Sequence[LayerUse], phase: ResolvedPhase, table: Mapping[str, Parameter], first_stage: int
) -> tuple[LayerUse, ...]:
    """All sub-layers of a model in a phase that may train some of its weights alone.

    `first_stage` of them are the pipeline's first stage: those after it give the stage before theirs a gradient.
    """
    if phase.trained is None:
        return tuple(uses)
    first = min(first_stage, _first_that_learns(phase, table))
    before = (_forward_alone(use, phase, layer) for layer, use in enumerate(uses[:first]))
    return (*before, *(_frozen(use, phase, table, first + later) for later, use in enumerate(uses[first:])))


def _first_that_learns(phase: ResolvedPhase, table: Mapping[str, Parameter]) -> int:
    """The first sub-layer through which a gradient goes."""
    if phase.learns("embedding.weight"):
        return 0
    arch = architecture(phase.model)
    learning = {name.partition(".mixer.")[0] for name in table if phase.learns(name)}  # layers.3, or shared.S
    places = zip(range(len(arch.specs)), arch.letters, strict=True)
    return next((at for at, letter in places if learning & {f"layers.{at}", f"shared.{letter}"}), len(arch.specs))


def _forward_alone(use: LayerUse, phase: ResolvedPhase, layer: int) -> LayerUse:
    arch = architecture(phase.model)
    passes = passes_of(arch.specs[layer], arch.sizes, phase.config.parallel.recompute, runs_again(phase))
    return LayerUse(kept=0, again=0, back=0, summed=use.summed // passes)


def _frozen(use: LayerUse, phase: ResolvedPhase, table: Mapping[str, Parameter], layer: int) -> LayerUse:
    arch = architecture(phase.model)
    spec = arch.specs[layer]
    found = projections_of(phase, table, layer)
    made = found.leaving if not spec.keeps_output else []
    gone = sum(shared(one.weight.shape[1], phase.config.parallel.tensor) for one in made if not one.keeps_input)
    entered = _entered(use, found, phase)
    more = entered - gone + sum(_beside(one, phase) for one in found.every)
    back = gone + 2 * max((_scaled(one, phase) for one in found.every), default=0)
    regathers = any(one.learns for one in found.entering) and not found.adapted
    used = replace(use, back=use.back + back, gathered=use.gathered if regathers else 0)
    if use.again:
        return replace(used, again=use.again + more)
    return replace(used, kept=use.kept + more, read=max(0, use.read + entered) if use.read else 0)


def _entered(use: LayerUse, found: SublayerWeights, phase: ResolvedPhase) -> int:
    """Values per token that are kept of a sub-layer's input, more than where all its projections learn."""
    if not found.entering:
        return 0
    kept = shared(found.width, phase.config.parallel.tensor if use.gathered else 1)
    if found.adapted:
        return found.width - kept
    if any(one.learns for one in found.entering):
        return 0
    return -kept


def _beside(projection: WeightUse, phase: ResolvedPhase) -> int:
    """Values per token that an adapter keeps, on one rank."""
    if projection.adapter is None:
        return 0
    return projection.adapter.shape[0] + _scaled(projection, phase)


def _scaled(projection: WeightUse, phase: ResolvedPhase) -> int:
    """Outputs on one rank that DoRA scales; in the backward pass their gradient in fp32 takes the place of two."""
    adapters = phase.model.adapters
    if projection.adapter is None or adapters is None or not adapters.dora:
        return 0
    return projection.weight.share_shape(phase.config.parallel.mesh_sizes)[0]
