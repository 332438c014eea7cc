"""Reads rows whose tokens are divided over context-parallel ranks: what one process reads of them, on every rank.

Each piece of a row is cut into shares, of which layers hand over what comes before, as in training
(`parallel/context.py`). What is made of every token is gathered, and the states after the piece are those after its
last share, which all ranks then hold. So they can all continue: the next piece by shares again, and alike, each for
itself, what can't be shared out evenly: a few tokens at a piece's end, and those of a text that is being written.
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

GROWING = ("keys", "values")  # those of full attention, behind those of the tokens before


def among_shares(inner: Reader, model: ModelConfig, context: ContextGroup) -> Reader:
    """A reader whose ranks divide what is read, from one whose ranks all have the same."""
    if context.size == 1:
        return inner
    unit = math.lcm(context.size, architecture(model).reads_in)

    def alike(tokens_BL: Tensor, states: States | None, seq: SeqInfo, wanted: Finish) -> tuple[Tensor, States]:
        # by all ranks, and yet one of them speaks: rounding on another device might choose another token there
        made, states = inner.forward(tokens_BL, states, seq, wanted)
        return of_last_share(made, context), states

    def forward(tokens_BL: Tensor, states: States | None, seq: SeqInfo, wanted: Finish) -> tuple[Tensor, States]:
        length = tokens_BL.shape[1]
        shared = length // unit * unit
        if not shared:
            return alike(tokens_BL, states, seq, wanted)
        if shared == length:
            return by_shares(inner.forward, context, tokens_BL, states, seq, wanted)
        here, rest = slice(0, shared), slice(shared, length)
        of_shared, of_rest = (NOTHING, wanted) if wanted.of_tokens is None else map(wanted.of_tokens, (here, rest))
        made, states = by_shares(inner.forward, context, *_part(tokens_BL, seq, here, states), of_shared)
        if seq.documents_BL is not None:
            states = from_zero(states, seq.documents_BL[:, shared] != seq.documents_BL[:, shared - 1])
        made_rest, states = alike(*_part(tokens_BL, seq, rest, states), of_rest)
        return made_rest if wanted.of_tokens is None else torch.cat((made, made_rest)), states

    return replace(inner, forward=forward, context=context)


def by_shares(
    forward: Forward, context: ContextGroup, tokens_BL: Tensor, states: States | None, seq: SeqInfo, wanted: Finish
) -> tuple[Tensor, States]:
    """Of tokens that the ranks divide evenly: what is wanted of them, and the states after, on every rank."""
    length = tokens_BL.shape[1]
    here = own_tokens(length, context)
    of_own = wanted if wanted.of_tokens is None else wanted.of_tokens(here)
    made, after = forward(tokens_BL[:, here], states, seq_of_share(seq, context), of_own)
    made = of_last_share(made, context) if wanted.of_tokens is None else of_all_shares(made, context)
    return made, states_of_row(after, states or {}, length, context)


def states_of_row(own: States, before: States, length: int, context: ContextGroup) -> States:
    """The states after a row of this length on every rank, each of which has those after its own share.

    Of keys that only grow, the row's own are sent: all ranks have those from before it.
    """
    parts = [
        [layer, name, list(part.shape), _grown(name, part, before.get(layer, {}).get(name), length)]
        for layer, state in own.items()
        for name, part in state.items()
    ]
    after: States = {layer: {} for layer in own}
    for layer, name, shape, grown in value_of_last_share(parts, context):
        of_own = own[layer][name]
        sent = of_own.new_empty(shape[0], grown or shape[1], *shape[2:]) if len(shape) > 1 else of_own.new_empty(shape)
        if context.rank == context.size - 1:
            sent.copy_(of_own[:, -grown:] if grown else of_own)
        fill_from_last_share(sent, context)
        after[layer][name] = _behind(before[layer][name], sent) if grown else sent
    return after


def _grown(name: str, part: Tensor, before: Tensor | None, length: int) -> int:
    """By how many tokens of the row a part has grown behind what it was, which is still there; 0 if it is another."""
    grows = name in GROWING and before is not None and part.shape[1] == before.shape[1] + length
    return length if grows else 0


def _behind(before: Tensor, sent: Tensor) -> Tensor:
    return torch.cat((before, sent), 1)


def _part(tokens_BL: Tensor, seq: SeqInfo, here: slice, states: States | None) -> tuple[Tensor, States | None, SeqInfo]:
    return tokens_BL[:, here], states, seq.map(lambda x_BL: x_BL[:, here].contiguous())
