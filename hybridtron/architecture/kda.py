"""Kimi Delta Attention (KDA): the delta rule with a decay per key channel. Kimi team 2025.

    a = decay_up(decay_down(u)),   b = b_proj(u)                        one number per key channel; one per head
    z = gate_up(gate_down(u)),   and the gate is sigmoid(z)             inner size of both: a head's value channels

Everything else is as in `delta_rule`. Kimi Linear combines it with attention without positions.
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
        """Return the inner size of the projections to decays and gate."""
        return self.head_sizes(model)[1]

    def projected(self, model: ModelSizes) -> tuple[tuple[str, int], ...]:
        return self.convolved(model)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        (keys, values), rank = self.channels(model), self.rank(model)
        # every rank computes the small inputs of decays and gate in full, and uses them for its own heads
        down = replace(linear(rank, model.width, fp8=False), cuts=(), partial_gradient=True)
        return super().parameters(model) | {
            "decay_down.weight": down,
            "decay_up.weight": linear(keys, rank, fp8=False),
            "b_proj.weight": linear(self.heads, model.width, fp8=False),
            "gate_down.weight": down,
            "gate_up.weight": linear(values, rank, fp8=False),
        }

    def exported_names(self, model: ModelSizes) -> Names:
        """Return the names in Kimi Linear's code; in flash-linear-attention each pair of projections is a sequence."""
        return super().exported_names(model) | {
            "f_a_proj.weight": ("decay_down.weight",),
            "f_b_proj.weight": ("decay_up.weight",),
            "b_proj.weight": ("b_proj.weight",),
            "g_a_proj.weight": ("gate_down.weight",),
            "g_b_proj.weight": ("gate_up.weight",),
        }

    def activation_values(self, model: ModelSizes) -> int:
        # a sigmoid keeps what it makes, and not the gate's projection
        return super().activation_values(model) - self.channels(model)[1] + 2 * self.rank(model)
