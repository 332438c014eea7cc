"""Retention: a state per head that decays at a fixed rate, read by rotated queries. RetNet, Sun et al. 2023.

    q, k -> RoPE;   h_t = gamma h_{t-1} + k_t v_t^T;   y_t = h_t^T q_t / sqrt(key channels of a head)
    gamma = 1 - 2^(-5 - head)                                                    `head` counts the heads from 0

h is a head's state. `linear_attention.py` describes the projections to q, k and v, the norm and the output gate. Scores
depend on positions only by RoPE and by the decay gamma^(i - j) between tokens i and j; the paper calls both together
xPos. Samba's Sliding RetNet combines retention with window attention; retention has half as many heads as attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.linear_attention import LinearAttentionSpec
from hybridtron.architecture.mamba2 import CHUNK
from hybridtron.limits import above
from hybridtron.problems import Problem


@dataclass(frozen=True)
class RetNetSpec(LinearAttentionSpec):
    """Options of a retention mixer. Mamba-2's op computes the recurrence."""

    kind: ClassVar[str] = "retnet"
    module: ClassVar[str] = "hybridtron.mixers.retnet:RetNet"
    chunk: ClassVar[int] = CHUNK

    expand_v: Annotated[float, above(0)] = 2.0  # value channels of all heads, in multiples of the model's width
    rope_base: Annotated[float, above(1)] = 10000.0  # base of the rotary positions

    def transition(self, model: ModelSizes) -> int:
        return self.heads

    def state_shape(self, model: ModelSizes) -> tuple[int, int]:
        key, value = self.head_sizes(model)
        return value, key

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from (problems := list(super().problems(model, max_seq_len)))
        if not problems and (keys := self.head_sizes(model)[0]) % 2:
            yield Problem(
                "heads",
                "not-divisible",
                f"is {self.heads}, which makes heads of {keys} keys: rotary positions turn pairs",
            )
