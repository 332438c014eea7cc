"""Single-process replacement of hybridtron's context parallelism, for the generated `mixers_hybridtron.py`.

Context parallelism divides the tokens of a row (sequence) over ranks. An exported model runs in a single process. So a
mixer has every token of its rows, and the state that the caller passes covers all earlier tokens. The functions here
therefore have nothing to exchange:

    contiguous_inputs         returns its inputs
    sharded_scan              runs the scan from the state
    halo_tokens, halo_kv      return the carried tokens, or keys and values, unchanged
    halo_parts                returns the carried tokens, split into the parts
    all others                raise NotImplementedError: only code for divided rows calls them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from torch import Tensor

Carried = TypeVar("Carried")
Inputs = TypeVar("Inputs")


def contiguous_inputs(inputs: Inputs, seq: Any) -> Inputs:
    return inputs


def sharded_scan(
    scan: Callable[[Tensor | None], tuple[Tensor, Tensor]],
    state: Tensor | None,
    seq: Any,
    total: Callable[[], Any],
) -> tuple[Tensor, Tensor]:
    return scan(state)


def halo_tokens(x_BLC: Tensor, count: int, carried_BTC: Tensor | None, seq: Any) -> Tensor | None:
    return carried_BTC


def halo_parts(
    parts_BLC: Sequence[Tensor], count: int, carried_BTC: Tensor | None, seq: Any
) -> Sequence[Tensor | None]:
    if carried_BTC is None:
        return [None] * len(parts_BLC)
    return carried_BTC.split([part_BLC.shape[-1] for part_BLC in parts_BLC], -1)


def halo_kv(k_BLGK: Tensor, v_BLGK: Tensor, window: int | None, carried: Carried, seq: Any) -> Carried:
    return carried


def only_for_shards(*_: Any) -> NoReturn:
    raise NotImplementedError("rows are not divided over ranks here")


incoming_state = only_for_shards
earlier_shards = only_for_shards
all_reduce_shards = only_for_shards
scan_transition = only_for_shards
ssd_transition = only_for_shards
decay_transition = only_for_shards
gla_transition = only_for_shards
delta_transition = only_for_shards
