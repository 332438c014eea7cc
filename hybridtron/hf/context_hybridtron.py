"""Single-process replacement of hybridtron's context parallelism, for the generated `mixers_hybridtron.py`.

No row is divided over ranks here, so a row's past is in the states that were passed in. The functions return these, and
those that only a sequence shard needs raise NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from torch import Tensor

Carried = TypeVar("Carried")
Inputs = TypeVar("Inputs")


def read_twice(inputs: Inputs, seq: Any) -> Inputs:
    return inputs


def scan_from(
    scan: Callable[[Tensor | None], tuple[Tensor, Tensor]],
    state: Tensor | None,
    seq: Any,
    total: Callable[[], Any],
) -> tuple[Tensor, Tensor]:
    return scan(state)


def tokens_before(x_BLC: Tensor, count: int, carried_BTC: Tensor | None, seq: Any) -> Tensor | None:
    return carried_BTC


def memory_before(k_BLGK: Tensor, v_BLGK: Tensor, window: int | None, carried: Carried, seq: Any) -> Carried:
    return carried


def of_a_share(*_: Any) -> NoReturn:
    raise NotImplementedError("a row is whole here")


state_before = of_a_share
earlier_shares = of_a_share
sum_over_shares = of_a_share
scan_transition = of_a_share
ssd_transition = of_a_share
decay_transition = of_a_share
gla_transition = of_a_share
delta_transition = of_a_share
