"""Inference over context-parallel ranks: every rank gets the result that one process would get for the full row.

Each chunk of a row is divided into sequence shards, and layers exchange the earlier tokens they need, as in training
(`parallel/context.py`). Results per token are all-gathered. The states after the chunk are those after its last shard,
and are broadcast to all ranks, so that any rank can continue. Tokens that cannot be divided evenly, such as a few at
the end of a chunk or new tokens in generation, are read by all ranks redundantly.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.data.batch import SeqInfo
from hybridtron.model.generate import NOTHING, Finish, Forward, Reader, from_zero
from hybridtron.model.stack import States
from hybridtron.parallel.context import (
    ContextGroup,
    fill_from_last_share,
    of_all_shares,
    of_last_share,
    own_tokens,
    seq_of_share,
    value_of_last_share,
)

GROWING = ("keys", "values")  # state parts of full attention, to which each chunk appends


def among_shares(inner: Reader, model: ModelConfig, context: ContextGroup) -> Reader:
    """Return a reader that divides tokens over context-parallel ranks; `inner` reads all tokens on each rank."""
    if context.size == 1:
        return inner
    unit = math.lcm(context.size, architecture(model).reads_in)

    def alike(tokens_BL: Tensor, states: States | None, seq: SeqInfo, wanted: Finish) -> tuple[Tensor, States]:
        # broadcast one rank's result, since rounding may differ between devices and ranks could choose different tokens
        result, states = inner.forward(tokens_BL, states, seq, wanted)
        return of_last_share(result, context), states

    def forward(tokens_BL: Tensor, states: States | None, seq: SeqInfo, wanted: Finish) -> tuple[Tensor, States]:
        length = tokens_BL.shape[1]
        shared = length // unit * unit
        if not shared:
            return alike(tokens_BL, states, seq, wanted)
        if shared == length:
            return by_shares(inner.forward, context, tokens_BL, states, seq, wanted)
        head, tail = slice(0, shared), slice(shared, length)
        if wanted.of_tokens is None:
            of_head = NOTHING
            of_tail = wanted
        else:
            of_head, of_tail = map(wanted.of_tokens, (head, tail))
        result, states = by_shares(inner.forward, context, *_part(tokens_BL, seq, head, states), of_head)
        if seq.documents_BL is not None:
            states = from_zero(states, seq.documents_BL[:, shared] != seq.documents_BL[:, shared - 1])
        result_tail, states = alike(*_part(tokens_BL, seq, tail, states), of_tail)
        return result_tail if wanted.of_tokens is None else torch.cat((result, result_tail)), states

    return replace(inner, forward=forward, context=context)


def by_shares(
    forward: Forward, context: ContextGroup, tokens_BL: Tensor, states: States | None, seq: SeqInfo, wanted: Finish
) -> tuple[Tensor, States]:
    """Read tokens that the ranks divide evenly; return the result and the new states on every rank."""
    length = tokens_BL.shape[1]
    shard = own_tokens(length, context)
    if wanted.of_tokens is None:
        of_own = wanted
    else:
        of_own = wanted.of_tokens(shard)
    result, after = forward(tokens_BL[:, shard], states, seq_of_share(seq, context), of_own)
    if wanted.of_tokens is None:
        result = of_last_share(result, context)
    else:
        result = of_all_shares(result, context)
    return result, states_of_row(after, states or {}, length, context)


def states_of_row(own: States, before: States, length: int, context: ContextGroup) -> States:
    """Broadcast the states after a row of this length, from the last shard to every rank.

    Keys and values that only grow are sent without their old part, which all ranks have already.
    """
    parts = [
        [layer, name, list(part.shape), _grown(name, part, before.get(layer, {}).get(name), length)]
        for layer, state in own.items()
        for name, part in state.items()
    ]
    after: States = {layer: {} for layer in own}
    for layer, name, shape, grown in value_of_last_share(parts, context):
        tensor = own[layer][name]
        if len(shape) > 1:
            sent = tensor.new_empty(shape[0], grown or shape[1], *shape[2:])
        else:
            sent = tensor.new_empty(shape)
        if context.rank == context.size - 1:
            sent.copy_(tensor[:, -grown:] if grown else tensor)
        fill_from_last_share(sent, context)
        if grown:
            after[layer][name] = _behind(before[layer][name], sent)
        else:
            after[layer][name] = sent
    return after


def _grown(name: str, part: Tensor, before: Tensor | None, length: int) -> int:
    """Return the number of tokens appended to a growing state part; 0 if the part was rewritten."""
    grows = name in GROWING and before is not None and part.shape[1] == before.shape[1] + length
    return length if grows else 0


def _behind(before: Tensor, sent: Tensor) -> Tensor:
    return torch.cat((before, sent), 1)


def _part(tokens_BL: Tensor, seq: SeqInfo, here: slice, states: States | None) -> tuple[Tensor, States | None, SeqInfo]:
    """Return a slice of the tokens as arguments for `forward`."""
    return tokens_BL[:, here], states, seq.map(lambda x_BL: x_BL[:, here].contiguous())
