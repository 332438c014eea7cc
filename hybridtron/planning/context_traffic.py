"""Bytes that context-parallel ranks send in a micro-batch, computed from the parts of each sub-layer's state.

Context-parallel ranks divide each row into equally long contiguous shards. A rank sends to the ranks with later shards:

    ssm     For a recurrence, a rank sends two fp32 tensors: the state that its shard adds, and the factor by which its
            shard multiplies the state before the shard. The ranks run a prefix scan: a rank sends to the next rank,
            and then to the ranks that are 1, 2, 4, ... places later.
    conv    For a convolution or a token shift, a rank sends its shard's last tokens. The next shard's rank reads them.
    kv      For full attention, a rank sends keys and values to all later ranks. For attention with a window, it sends
            them to the ranks within the window.
    sparse  For attention to few selected keys, a rank sends its shard's selected keys to all later ranks. A sum of
            queries is sent in a prefix scan, without gradients.
    span    For span-expanded attention, a rank sends all keys and values, and the queries of an unfinished block.

Small tensors that ranks all-reduce are not counted: candidates for the ranking loss (sparse) and block tables (span).

Communication takes place in rounds. In a round with distance d, each rank r sends to rank r + d, if this rank exists.
In the backward pass, rank r + d sends the gradient back to rank r. So the ranks with the last shards send less in the
forward pass, and the ranks with the first shards send less in the backward pass. A rank saves received tensors for its
backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hybridtron.architecture.base import MixerSpec, ModelSizes, StatePart
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.planning.activations import SublayerUse, is_recomputed, shared
from hybridtron.planning.count import FP32_BYTES, VALUE_BYTES
from hybridtron.planning.states import part_bytes, state_values


class Round(NamedTuple):
    """One exchange between ranks.

    hop: distance; rank r sends to rank r + hop
    bytes: bytes that each rank sends
    returns: whether a gradient is sent back in the backward pass
    """

    hop: int
    bytes: int
    returns: bool = True


def sent_by_layers(phase: ResolvedPhase) -> tuple[int, ...]:
    """Return, for each sub-layer, the most bytes that any rank sends in a micro-batch.

    A rank's bytes are the sum over the forward and the backward pass.
    """
    arch = phase.arch
    if phase.config.parallel.context == 1:
        return (0,) * len(arch.specs)
    by_letter = {letter: _busiest(spec, arch.sizes, phase) for letter, spec in arch.by_letter.items()}
    return tuple(by_letter[letter] for letter in arch.letters)


def with_received(uses: Sequence[SublayerUse], phase: ResolvedPhase) -> tuple[SublayerUse, ...]:
    """Return the uses, increased by the elements per token that the last rank receives and saves for backward."""
    if phase.config.parallel.context == 1:
        return tuple(uses)
    arch = phase.arch
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
    """Return the distance in ranks for each round of a prefix scan."""
    doublings = math.ceil(math.log2(max(1, context - 1)))
    return [1, *(2**doubling for doubling in range(doublings))]


def _key_rounds(part: StatePart, phase: ResolvedPhase) -> Iterator[Round]:
    """Yield the rounds that exchange one part of an attention layer's state."""
    if not part.shape:  # a count of tokens, such as `length`; every rank computes it
        return
    context = phase.config.parallel.context
    rows = phase.settings.micro_batch
    length = phase.settings.seq_len // context
    if part.exchange == "sets":  # selected keys in slots; a shard fills at most one slot per token
        slots = min(part.shape[0] or length, length)
        sent_bytes = part_bytes(_of_length(part, slots), phase) * rows
        yield from (Round(hop, sent_bytes, part.dtype is None) for hop in range(1, context))
    elif part.exchange == "sum":  # a decayed sum is sent with its decay factor, which has equal size
        yield from (Round(hop, 2 * part_bytes(part, phase) * rows, False) for hop in _hops(context))
    elif part.exchange == "tail":
        yield Round(1, part_bytes(part, phase) * rows, False)
    elif part.exchange != "table":
        if part.exchange is None and part.shape[0] is not None:
            tokens = part.shape[0]
        else:
            tokens = length * (context - 1)
        for hop in range(1, math.ceil(tokens / length) + 1):
            sent_tokens = min(length, tokens - (hop - 1) * length)
            yield Round(hop, part_bytes(_of_length(part, sent_tokens), phase) * rows)


def _of_length(part: StatePart, tokens: int) -> StatePart:
    return replace(part, shape=(tokens, *part.shape[1:]))
