"""Traffic of a pipeline rank's devices in an optimizer step, in bytes: an estimate.

With t tensor-parallel, p pipeline and d data-parallel ranks:

    tensor      a sub-layer sums its output (forward) and its input's gradient (backward), and what it sums inside
                (Mamba's dt, B and C) in both; once more where it is recomputed. Summing n bytes sends 2 (t - 1) / t n;
                gathering and scattering under sequence parallelism send the same together. With `parallel.regather`
                the input is gathered once more.
    pipeline    the stream (by t under sequence parallelism), and the embedding where sub-layers read it, forward, and
                gradients back, for every border
    gradients   scattered over the data-parallel ranks, (d - 1) / d of them sent, if the optimizer is distributed, else
                summed; gradients of shared weights are summed over their stages
    parameters  weights, gathered from the data-parallel ranks if the optimizer is distributed
    context     what context-parallel ranks hand over (`row_shares.py`), of the busiest of them
    host        offloaded activations, both ways
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridtron.architecture.base import MixerSpec, ModelSizes, Parameter
from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.planning.activations import chunks_run_again, gathers_again, is_recomputed
from hybridtron.planning.count import gradient_bytes
from hybridtron.planning.weights import local_size


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends in an optimizer step."""

    tensor: int
    pipeline: int
    gradients: int
    parameters: int
    host: int = 0  # to its host and from it
    context: int = 0  # between the ranks that share the rows

    @property
    def total(self) -> int:
        """All of it together."""
        return self.tensor + self.pipeline + self.gradients + self.parameters + self.host + self.context


def exchanged_values(phase: ResolvedPhase) -> tuple[int, ...]:
    """Return the values per token that tensor-parallel ranks gather or scatter for each sub-layer."""
    arch = architecture(phase.model)
    if phase.config.parallel.tensor == 1:
        return (0,) * len(arch.specs)
    by_letter = {letter: _exchanged(spec, arch.sizes, phase) for letter, spec in arch.by_letter.items()}
    return tuple(by_letter[letter] for letter in arch.letters)


def _exchanged(spec: MixerSpec, sizes: ModelSizes, phase: ResolvedPhase) -> int:
    """Return them for one sub-layer: a sum counts twice, as a gather and a scatter."""
    # one of the row-parallel projections writes to the stream; the others are summed inside the mixer
    rows = [weight.shape[0] for weight in spec.parameters(sizes).values() if any(cut.axis == 1 for cut in weight.cuts)]
    passes = 2 + is_recomputed(spec, sizes, phase.config.parallel.recompute) + chunks_run_again(phase)
    return 2 * passes * sum(rows) + gathers_again(spec, phase.config) * sizes.width


def summed_over_stages(phase: ResolvedPhase, table: Mapping[str, Parameter], held: Sequence[Sequence[str]]) -> int:
    """Return the bytes that a rank sends of the gradients of weights shared by places on several stages."""
    ranks = len(held)
    homes = Counter(name for names in held for name in names if table[name].shared and phase.learns(name))
    summed = sum(
        gradient_bytes(phase.config.precision, table[name].fp32) * local_size(table[name], phase.config.parallel)
        for name, count in homes.items()
        if count > 1
    )
    return 2 * summed * (ranks - 1) // ranks
