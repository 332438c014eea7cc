"""Traffic of context-parallel ranks for a micro-batch, by the parts of sub-layers' states (`parallel/context.py`).

    ssm     the state that a share adds and what multiplies the one before it, in fp32: to the next rank, and then in as
            many rounds as doubling needs to come from the first share to the last but one
    conv    the last tokens that a convolution or a token shift reads
    kv      keys and values of a window, from as many ranks as it reaches; all of them in full attention
    sparse  what every share remembers, to all later ones; and the sum of queries as `ssm`, without a gradient. The few
            candidates of the ranking loss, which are summed over the ranks, are not counted
    span    all keys and values, and the queries of the block under way. The tables of blocks that are summed over the
            ranks are not counted

Every round goes forward in a forward pass and back in the backward pass. A rank at an end of the row sends less. For
the backward pass a rank keeps the states, keys and values that it received; the last rank of full attention receives
most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hybridtron.architecture.base import MixerSpec, ModelSizes, StatePart
from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.planning.activations import SublayerUse, is_recomputed, shared
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES
from hybridtron.planning.states import part_bytes, state_values


class Round(NamedTuple):
    """One exchange: how many ranks further it sends, its bytes, and whether its gradient returns."""

    hop: int
    bytes: int
    returns: bool = True


def sent_by_layers(phase: ResolvedPhase) -> tuple[int, ...]:
    """Return the bytes that the busiest rank sends for each sub-layer, in both passes of a micro-batch."""
    arch = architecture(phase.model)
    if phase.config.parallel.context == 1:
        return (0,) * len(arch.specs)
    by_letter = {letter: _busiest(spec, arch.sizes, phase) for letter, spec in arch.by_letter.items()}
    return tuple(by_letter[letter] for letter in arch.letters)


def with_received(uses: Sequence[SublayerUse], phase: ResolvedPhase) -> tuple[SublayerUse, ...]:
    """Add to each sub-layer's activations what the ranks before it in the row sent."""
    if phase.config.parallel.context == 1:
        return tuple(uses)
    arch = architecture(phase.model)
    recompute = phase.config.parallel.recompute
    value_bytes = phase.tokens_of_rank * VALUE_BYTES[phase.precision.name]
    with_more = []
    for use, spec in zip(uses, arch.specs, strict=True):
        received = -(-sum(sent.bytes for sent in _rounds(spec, arch.sizes, phase)) // value_bytes)
        with_more.append(use.with_more(received, is_recomputed(spec, arch.sizes, recompute)))
    return tuple(with_more)


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


def _rounds(spec: MixerSpec, sizes: ModelSizes, phase: ResolvedPhase) -> Iterator[Round]:
    parallel = phase.config.parallel
    rows = phase.settings.micro_batch
    for part in spec.state_parts(sizes).values():
        if part.kind == "ssm":
            values = state_values(part, parallel) + shared(part.transition, parallel.tensor)
            yield from (Round(hop, values * FP32_BYTES * rows) for hop in _hops(parallel.context))
        elif part.kind == "conv":
            yield Round(1, part_bytes(part, phase) * rows)
        else:
            yield from _key_rounds(part, phase)


def _hops(context: int) -> list[int]:
    """Return the distance of each round that brings every share the state before it."""
    doublings = math.ceil(math.log2(max(1, context - 1)))
    return [1, *(2**doubling for doubling in range(doublings))]


def _key_rounds(part: StatePart, phase: ResolvedPhase) -> Iterator[Round]:
    """Yield the rounds of keys, of values or of values beside them; none for their number."""
    if not part.shape:
        return
    context = phase.config.parallel.context
    rows = phase.settings.micro_batch
    length = phase.settings.seq_len // context
    if part.handed == "sets":  # in as many slots as are needed and as a share has tokens
        slots = min(part.shape[0] or length, length)
        sent_bytes = part_bytes(_of_length(part, slots), phase) * rows
        yield from (Round(hop, sent_bytes, part.dtype is None) for hop in range(1, context))
    elif part.handed == "sum":  # with what it is multiplied by
        yield from (Round(hop, 2 * part_bytes(part, phase) * rows, False) for hop in _hops(context))
    elif part.handed == "tail":
        yield Round(1, part_bytes(part, phase) * rows, False)
    elif part.handed != "table":
        if part.handed is None and part.shape[0] is not None:
            tokens = part.shape[0]
        else:
            tokens = length * (context - 1)
        for hop in range(1, math.ceil(tokens / length) + 1):
            held = min(length, tokens - (hop - 1) * length)
            yield Round(hop, part_bytes(_of_length(part, held), phase) * rows)


def _of_length(part: StatePart, tokens: int) -> StatePart:
    return replace(part, shape=(tokens, *part.shape[1:]))
