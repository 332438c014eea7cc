"""Gated DeltaNet: the delta rule with one decay per head. Yang, Kautz and Hatamizadeh 2025.

    a, b = ab_proj(u)                                                       one a and one b per head

u is the mixer's input. a gives the decays and b the step sizes; `delta_rule.py` has the recurrence and everything else.
With `key_heads`, as in Qwen3-Next, several heads share queries and keys, but each head has its own values, state and
decays: head h uses key head h // (heads / key_heads).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hybridtron.architecture.base import ModelSizes, Names, Parameter, linear
from hybridtron.architecture.delta_rule import DeltaRuleSpec
from hybridtron.limits import above, at_least, divisors_near
from hybridtron.problems import Problem, choice


@dataclass(frozen=True)
class GatedDeltaNetSpec(DeltaRuleSpec):
    """Options of a Gated DeltaNet mixer."""

    kind: ClassVar[str] = "gated_deltanet"
    module: ClassVar[str] = "hybridtron.mixers.gated_deltanet:GatedDeltaNet"
    supports_mup: ClassVar[bool] = True

    key_heads: Annotated[int | None, at_least(1)] = None  # number of query heads and of key heads; null: `heads`
    expand_k: Annotated[float, above(0)] = 0.75  # key channels of all key heads, in multiples of the model's width
    expand_v: Annotated[float, above(0)] = 1.5  # value channels of all heads, in multiples of the model's width

    @property
    def growing_heads(self) -> tuple[str, ...]:
        if self.key_heads is None:
            return ("heads",)
        return ("heads", "key_heads")

    @property
    def num_key_heads(self) -> int:
        return self.key_heads or self.heads

    def decays(self, model: ModelSizes) -> int:
        return self.heads

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        per_head = (("a", self.heads), ("b", self.heads))
        return super().parameters(model) | {
            "ab_proj.weight": linear(2 * self.heads, model.width, parts=per_head, fp8=False)
        }

    def exported_names(self, model: ModelSizes) -> Names:
        """Return the weights' names in flash-linear-attention, where a and b have separate projections."""
        return super().exported_names(model) | {f"{part}_proj.weight": (f"ab_proj.weight.{part}",) for part in "ab"}

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from super().problems(model, max_seq_len)
        if self.heads % self.num_key_heads:
            fitting = choice(divisors_near(self.heads, self.num_key_heads))
            yield Problem(
                "key_heads", "not-divisible", f"is {self.key_heads}, must divide heads={self.heads}: {fitting}"
            )

    def layout_problems(self, model: ModelSizes, tensor: int) -> Iterator[Problem]:
        yield from (problems := list(super().layout_problems(model, tensor)))
        if not problems and self.num_key_heads % tensor:
            yield Problem("key_heads", "not-divisible", f"is {self.key_heads}, which {tensor} ranks can't share evenly")
