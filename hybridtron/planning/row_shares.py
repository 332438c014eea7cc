"""What ranks that share the rows send for a micro-batch, by the parts of sub-layers' states (`parallel/context.py`).

    ssm     the state that a share adds and what it does to the one before, in fp32: to the next rank, and then in as
            many rounds as doubling needs to come from the first share to the last but one
    conv    the last tokens that a convolution or a token shift reads
    kv      keys and values of a window, from as many ranks as it reaches; all of them in full attention
    sparse  what every share remembers, to all later ones; and the sum of queries as `ssm`, without a gradient. The few
            candidates of the ranking loss, which are summed over the ranks, are not counted
    span    all keys and values, and the queries of the block under way. The tables of blocks that are summed over the
            ranks are not counted

For the backward pass a rank keeps the state that its share starts from and what came in the rounds, with what it had of
its own, and the keys and values that came; of these the last rank of full attention has the most. A recurrence runs
twice: each run keeps what it alone needs, and in the backward pass the gradients that one run makes of its inputs wait
for those of the other.

Every round goes forward in a forward pass and back in the backward pass. A rank at an end of the row sends less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hybridtron.architecture.base import MixerSpec, ModelSizes, StatePart
from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES
from hybridtron.planning.layer_use import LayerUse, is_recomputed, shared, sizes_of, state_values


def sent_by_layers(phase: ResolvedPhase) -> tuple[int, ...]:
    """Bytes that the busiest rank sends for each sub-layer, in both passes of a micro-batch."""
    if phase.config.parallel.context == 1:
        return (0,) * len(architecture(phase.model).specs)
    arch = architecture(phase.model)
    by_letter = {letter: _busiest(spec, arch.sizes, phase) for letter, spec in arch.by_letter.items()}
    return tuple(by_letter[letter] for letter in arch.letters)


def with_handed_over(uses: Sequence[LayerUse], phase: ResolvedPhase) -> tuple[LayerUse, ...]:
    """What sub-layers keep, with what came from ranks that share the rows."""
    parallel = phase.config.parallel
    if parallel.context == 1:
        return tuple(uses)
    specs = architecture(phase.model).specs
    sizes = sizes_of(phase.config)
    token = phase.tokens_of_rank * VALUE_BYTES[phase.precision.name]
    found = []
    for use, spec in zip(uses, specs, strict=True):
        more = spec.run_values(sizes) - spec.given_up_values(sizes)
        came = -(-_kept(spec, sizes, phase) // token) + shared(more, parallel.tensor)
        use = replace(use, back=use.back + shared(spec.read_values(sizes), parallel.tensor))
        again = is_recomputed(spec, sizes, parallel.recompute)
        found.append(replace(use, again=use.again + came) if again else replace(use, kept=use.kept + came))
    return tuple(found)


def _kept(spec: MixerSpec, sizes: ModelSizes, phase: ResolvedPhase) -> int:
    """Bytes, on the rank that keeps the most."""
    parallel = phase.config.parallel
    states = [part for part in spec.state_parts(sizes).values() if part.kind == "ssm"]
    rounds = _doublings(parallel.context)
    of_state = sum(state_values(part, parallel) for part in states)
    totals = shared(spec.transition_values(sizes), parallel.tensor) * (1 + 2 * rounds)
    of_states = ((1 + rounds) * of_state + totals) * FP32_BYTES * phase.settings.micro_batch
    keys = [part for part in spec.state_parts(sizes).values() if part.kind == "kv"]
    return of_states + sum(sent.bytes for part in keys for sent in _key_rounds(part, phase))


def _busiest(spec: MixerSpec, sizes: ModelSizes, phase: ResolvedPhase) -> int:
    parallel = phase.config.parallel
    forward = 1 + is_recomputed(spec, sizes, parallel.recompute)
    rounds = list(_rounds(spec, sizes, phase))
    return max(
        sum(
            sent.bytes * (forward * (rank + sent.hop < parallel.context) + (sent.returns and rank >= sent.hop))
            for sent in rounds
        )
        for rank in range(parallel.context)
    )


class HandedOver(NamedTuple):
    """How many ranks further something is sent, how many bytes it has, and whether its gradient returns."""

    hop: int
    bytes: int
    returns: bool = True


def _rounds(spec: MixerSpec, sizes: ModelSizes, phase: ResolvedPhase) -> Iterator[HandedOver]:
    parallel = phase.config.parallel
    rows = phase.settings.micro_batch
    value = VALUE_BYTES[phase.precision.name]
    for part in spec.state_parts(sizes).values():
        if part.kind == "ssm":
            both = state_values(part, parallel) + shared(spec.transition_values(sizes), parallel.tensor)
            yield from (HandedOver(hop, both * FP32_BYTES * rows) for hop in _hops(parallel.context))
        elif part.kind == "conv":
            yield HandedOver(1, state_values(part, parallel) * value * rows)
        else:
            yield from _key_rounds(part, phase)


def _hops(context: int) -> list[int]:
    """Of the rounds that bring every share the state before it."""
    return [1, *(2**round for round in range(_doublings(context)))]


def _doublings(context: int) -> int:
    """Rounds that follow the first."""
    return math.ceil(math.log2(max(1, context - 1)))


def _key_rounds(part: StatePart, phase: ResolvedPhase) -> Iterator[HandedOver]:
    """Of keys or of values, or of what stands beside them; of none where a part says how many are real."""
    parallel = phase.config.parallel
    if not part.shape:
        return
    context = parallel.context
    length = phase.settings.seq_len // parallel.context
    if part.handed == "sets":  # in as many slots as are needed and as a share has tokens
        slots = min(part.shape[0] or length, length)
        each = _part_bytes(replace(part, shape=(slots, *part.shape[1:])), phase)
        yield from (HandedOver(hop, each, part.dtype is None) for hop in range(1, context))
    elif part.handed == "sum":  # with what it is multiplied by
        yield from (HandedOver(hop, 2 * _part_bytes(part, phase), False) for hop in _hops(context))
    elif part.handed == "tail":
        yield HandedOver(1, _part_bytes(part, phase), False)
    elif part.handed != "table":
        if part.handed is None and part.shape[0] is not None:
            tokens = part.shape[0]
        else:
            tokens = length * (context - 1)
        for hop in range(1, math.ceil(tokens / length) + 1):
            held = min(length, tokens - (hop - 1) * length)
            yield HandedOver(hop, _part_bytes(replace(part, shape=(held, *part.shape[1:])), phase))


def _part_bytes(part: StatePart, phase: ResolvedPhase) -> int:
    value = {None: VALUE_BYTES[phase.precision.name], "float32": FP32_BYTES, "int64": 8}[part.dtype]
    return state_values(part, phase.config.parallel) * value * phase.settings.micro_batch
