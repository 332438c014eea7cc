"""Estimate of the bytes that a device sends in an optimizer step, by the parallel layout's dimensions.

With t tensor-parallel and d data-parallel ranks:

    tensor      A sub-layer all-reduces its output in the forward pass, and its input's gradient in the backward pass.
                Some mixers also all-reduce a projection in both passes (Mamba: dt, B and C). Recomputation repeats the
                all-reduces in the forward pass. An all-reduce of n bytes sends 2 n (t - 1) / t bytes. With sequence
                parallelism, an all-gather and a reduce-scatter replace each all-reduce, and together send as many
                bytes. With `parallel.regather` the input is all-gathered once more in the backward pass.
    pipeline    At every stage boundary, the forward pass sends the residual stream (divided by t with sequence
                parallelism), and the embedding if later sub-layers read it. The backward pass sends their gradients.
    gradients   With a distributed optimizer, n bytes of gradients are reduce-scattered over the data-parallel ranks: a
                device sends n (d - 1) / d bytes. Without a distributed optimizer, gradients are all-reduced, and a
                device sends twice as many bytes. Gradients for weights that several stages share are also all-reduced
                over these stages.
    parameters  With a distributed optimizer, updated weights are all-gathered over the data-parallel ranks.
    experts     If e ranks divide the experts, a device sends a row for each choice of its tokens, n bytes in all, and
                returns the outputs for other ranks' tokens. With even loads, each message has n (e - 1) / e bytes to
                other ranks. The backward pass sends as many bytes as the forward pass.
    context     Most bytes that any context-parallel rank sends (`context_traffic.py`).
    host        Offloaded activations, to the host and back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridtron.architecture.base import EXPERTS, MixerSpec, ModelSizes, Parameter
from hybridtron.architecture.moe import MoESpec
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.planning.activations import (
    chunks_run_again,
    gathers_in_backward,
    is_recomputed,
    is_row_parallel,
    rows_per_token,
)
from hybridtron.planning.count import gradient_bytes
from hybridtron.planning.weights import local_size


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends in an optimizer step; the module's docstring describes the fields."""

    tensor: int
    pipeline: int
    gradients: int
    parameters: int
    host: int = 0
    context: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """Sum over all fields."""
        return self.tensor + self.pipeline + self.gradients + self.parameters + self.host + self.context + self.experts


def exchanged_rows(phase: ResolvedPhase) -> tuple[int, ...]:
    """Return, for each sub-layer, the elements per token that a rank sends to ranks with other experts.

    Loads are assumed to be even. With slots (a capacity) the loads do not matter. Tokens are those of the rank's
    sequence shard, before sequence parallelism divides it.
    """
    parallel = phase.config.parallel
    return tuple(_rows_sent(spec, phase) if parallel.expert > 1 else 0 for spec in phase.arch.specs)


def _rows_sent(spec: MixerSpec, phase: ResolvedPhase) -> int:
    if not isinstance(spec, MoESpec):
        return 0
    parallel = phase.config.parallel
    again = is_recomputed(spec, phase.arch.sizes, parallel.recompute) + chunks_run_again(phase)
    values = 2 * (2 + again) * rows_per_token(spec, phase) * spec.outer(phase.arch.sizes)
    sharing = parallel.tensor // parallel.expert_tensor_ranks  # ranks that route different tokens of the same row
    return int(values * (parallel.expert - 1) / (parallel.expert * sharing))


def exchanged_values(phase: ResolvedPhase) -> tuple[int, ...]:
    """Return, for each sub-layer, the elements per token that tensor-parallel ranks gather or scatter."""
    arch = phase.arch
    if phase.config.parallel.tensor == 1:
        return (0,) * len(arch.specs)
    by_letter = {letter: _exchanged(spec, arch.sizes, phase) for letter, spec in arch.by_letter.items()}
    return tuple(
        by_letter[letter] + gathers_in_backward(layer, phase) * arch.sizes.width
        for layer, letter in enumerate(arch.letters)
    )


def _exchanged(spec: MixerSpec, sizes: ModelSizes, phase: ResolvedPhase) -> int:
    """Return the elements per token that a sub-layer gathers or scatters; an all-reduce counts as both.

    The outputs of row-parallel projections are all-reduced: the mixer's output, and projections inside the mixer. With
    `parallel.expert_tensor=1`, a rank has full experts, whose outputs need no all-reduce.
    """
    parallel = phase.config.parallel
    full_experts = parallel.expert_tensor_ranks < parallel.tensor
    rows = [
        weight.shape[-2]
        for weight in spec.parameters(sizes).values()
        if is_row_parallel(weight) and not (full_experts and weight.family == EXPERTS)
    ]
    passes = 2 + is_recomputed(spec, sizes, parallel.recompute) + chunks_run_again(phase)
    return 2 * passes * sum(rows)


def summed_over_stages(
    phase: ResolvedPhase, table: Mapping[str, Parameter], names_by_rank: Sequence[Sequence[str]]
) -> int:
    """Return the bytes that a rank sends to all-reduce gradients of weights shared by several pipeline ranks.

    names_by_rank: for each pipeline rank, the names of its weights
    """
    ranks = len(names_by_rank)
    homes = Counter(name for names in names_by_rank for name in names if table[name].shared and phase.learns(name))
    summed = sum(
        gradient_bytes(phase.config.precision, table[name].fp32) * local_size(table[name], phase.config.parallel)
        for name, count in homes.items()
        if count > 1
    )
    return 2 * summed * (ranks - 1) // ranks
