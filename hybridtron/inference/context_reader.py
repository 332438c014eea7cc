"""Inference over context-parallel ranks: every rank gets the result that one process would get for the full row.

A row (a sequence of the batch) is read in chunks of consecutive tokens. Each chunk is divided into sequence shards, one
per rank, and layers exchange the earlier tokens they need, as in training (`parallel/context.py`). Results per token
are all-gathered. The rank with the last shard has the states after the chunk, and broadcasts them, so that every rank
can continue with the next chunk. Every rank reads all tokens that can't be divided evenly: the remainder at a chunk's
end, and new tokens in generation.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.inference.reader import EMPTY_READOUT, Forward, Reader, Readout, reset_rows
from hybridtron.model.stack import States
from hybridtron.parallel.context import (
    all_gather_shards,
    broadcast_from_last,
    fill_from_last_shard,
    local_tokens,
    seq_of_shard,
    value_from_last_shard,
)
from hybridtron.parallel.mesh import RankGroup

GROWING = ("keys", "values")  # state tensors to which full attention appends each chunk's tokens


def context_reader(inner: Reader, chunk_multiple: int, context: RankGroup) -> Reader:
    """Return a reader that divides tokens over context-parallel ranks.

    `inner` reads all tokens that it gets, on each rank by itself. `chunk_multiple` is the architecture's property of
    this name: a text may be split only at multiples of this number of tokens.
    """
    if context.size == 1:
        return inner
    unit = math.lcm(context.size, chunk_multiple)

    def read_replicated(
        tokens_BL: Tensor, states: States | None, seq: SeqInfo, readout: Readout
    ) -> tuple[Tensor, States]:
        # every rank uses the last rank's result: with different rounding, ranks could choose different tokens
        result, states = inner.forward(tokens_BL, states, seq, readout)
        return broadcast_from_last(result, context), states

    def forward(tokens_BL: Tensor, states: States | None, seq: SeqInfo, readout: Readout) -> tuple[Tensor, States]:
        length = tokens_BL.shape[1]
        shared = length // unit * unit
        if not shared:
            return read_replicated(tokens_BL, states, seq, readout)
        if shared == length:
            return read_sharded(inner.forward, context, tokens_BL, states, seq, readout)
        head, tail = slice(0, shared), slice(shared, length)
        if readout.of_tokens is None:
            head_readout = EMPTY_READOUT
            tail_readout = readout
        else:
            head_readout, tail_readout = map(readout.of_tokens, (head, tail))
        result, states = read_sharded(inner.forward, context, *_part(tokens_BL, seq, head, states), head_readout)
        if seq.documents_BL is not None:
            states = reset_rows(states, seq.documents_BL[:, shared] != seq.documents_BL[:, shared - 1])
        result_tail, states = read_replicated(*_part(tokens_BL, seq, tail, states), tail_readout)
        return result_tail if readout.of_tokens is None else torch.cat((result, result_tail)), states

    return replace(inner, forward=forward, context=context)


def read_sharded(
    forward: Forward, context: RankGroup, tokens_BL: Tensor, states: States | None, seq: SeqInfo, readout: Readout
) -> tuple[Tensor, States]:
    """Read tokens that the ranks can divide evenly; return the result and the new states on every rank."""
    length = tokens_BL.shape[1]
    shard = local_tokens(length, context)
    if readout.of_tokens is None:
        shard_readout = readout
    else:
        shard_readout = readout.of_tokens(shard)
    result, after = forward(tokens_BL[:, shard], states, seq_of_shard(seq, context), shard_readout)
    if readout.of_tokens is None:
        result = broadcast_from_last(result, context)
    else:
        result = all_gather_shards(result, context)
    return result, broadcast_row_states(after, states or {}, length, context)


def broadcast_row_states(own: States, before: States, length: int, context: RankGroup) -> States:
    """Return the states after `length` tokens on every rank, broadcast from the last shard's rank.

    `own` has this rank's states after its shard. `before` has the states before the tokens. If the tokens were appended
    to a state tensor's earlier content (such as the keys of full attention), only these tokens are sent, because all
    ranks have the earlier content.
    """
    parts = [
        [layer, name, list(part.shape), _grown(name, part, before.get(layer, {}).get(name), length)]
        for layer, state in own.items()
        for name, part in state.items()
    ]
    after: States = {layer: {} for layer in own}
    for layer, name, shape, grown in value_from_last_shard(parts, context):
        tensor = own[layer][name]
        if len(shape) > 1:
            received = tensor.new_empty(shape[0], grown or shape[1], *shape[2:])
        else:
            received = tensor.new_empty(shape)
        if context.rank == context.size - 1:
            received.copy_(tensor[:, -grown:] if grown else tensor)
        fill_from_last_shard(received, context)
        if grown:
            after[layer][name] = _append(before[layer][name], received)
        else:
            after[layer][name] = received
    return after


def _grown(name: str, part: Tensor, before: Tensor | None, length: int) -> int:
    """Return how many tokens were appended to a state tensor, or 0 if the tensor was replaced."""
    grows = name in GROWING and before is not None and part.shape[1] == before.shape[1] + length
    return length if grows else 0


def _append(before: Tensor, received: Tensor) -> Tensor:
    return torch.cat((before, received), 1)


def _part(tokens_BL: Tensor, seq: SeqInfo, here: slice, states: States | None) -> tuple[Tensor, States | None, SeqInfo]:
    """Return arguments for `forward` that read only the tokens in the slice `here`."""
    return tokens_BL[:, here], states, seq.map(lambda x_BL: x_BL[:, here].contiguous())
