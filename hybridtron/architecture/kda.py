"""Kimi Delta Attention (KDA): the delta rule with a decay per key channel. Kimi team 2025.

    a = decay_up(decay_down(u)),   b = b_proj(u)                        one a per key channel; one b per head
    z = gate_up(gate_down(u))                                           the output gate is sigmoid(z)

u is the mixer's input. a gives the decays and b the step sizes; `delta_rule.py` has the recurrence and everything else.
The low-rank projections to a and to z both have an inner size equal to a head's value channels. Kimi Linear combines
KDA with attention without positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hybridtron.architecture.base import ModelSizes, Names, Parameter, linear
from hybridtron.architecture.delta_rule import DeltaRuleSpec


@dataclass(frozen=True)
class KDASpec(DeltaRuleSpec):
    """Options of a KDA mixer."""

    kind: ClassVar[str] = "kda"
    module: ClassVar[str] = "hybridtron.mixers.kda:KDA"

    def decays(self, model: ModelSizes) -> int:
        return self.channels(model)[0]

    def rank(self, model: ModelSizes) -> int:
        """Return the inner size of the low-rank projections to decays and gate."""
        return self.head_sizes(model)[1]

    def projected(self, model: ModelSizes) -> tuple[tuple[str, int], ...]:
        return self.convolved(model)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        (keys, values), rank = self.channels(model), self.rank(model)
        # not sharded: every tensor-parallel rank computes the whole inner vector, and uses it for its own heads
        down = replace(linear(rank, model.width, fp8=False), cuts=(), partial_gradient=True)
        return super().parameters(model) | {
            "decay_down.weight": down,
            "decay_up.weight": linear(keys, rank, fp8=False, inner=True),
            "b_proj.weight": linear(self.heads, model.width, fp8=False),
            "gate_down.weight": down,
            "gate_up.weight": linear(values, rank, fp8=False, inner=True),
        }

    def exported_names(self, model: ModelSizes) -> Names:
        """Return the weights' names in Kimi Linear's code."""
        return super().exported_names(model) | {
            "f_a_proj.weight": ("decay_down.weight",),
            "f_b_proj.weight": ("decay_up.weight",),
            "b_proj.weight": ("b_proj.weight",),
            "g_a_proj.weight": ("gate_down.weight",),
            "g_b_proj.weight": ("gate_up.weight",),
        }

    def activation_values(self, model: ModelSizes) -> int:
        # inner vectors of the two low-rank projections, whole on every rank
        return super().activation_values(model) + 2 * self.rank(model) * model.tensor
