"""Gated linear attention: a state per head whose key channels each decay at their own rate. Yang et al. 2024.

    g = log sigmoid(up(down(u)) + bias) / 16
    h_t = diag(exp(g_t)) h_{t-1} + k_t v_t^T;   y_t = h_t^T q_t / sqrt(key channels of a head)

Everything else is as in `linear_attention`. Samba's Sliding GLA combines it with window attention, with heads of 384
value channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from hybridtron.architecture.base import Cut, ModelSizes, Names, Parameter, linear
from hybridtron.architecture.inits import Constant
from hybridtron.architecture.linear_attention import LinearAttentionSpec
from hybridtron.limits import above, at_least


@dataclass(frozen=True)
class GLASpec(LinearAttentionSpec):
    """Options of a GLA mixer."""

    kind: ClassVar[str] = "gla"
    module: ClassVar[str] = "hybridtron.mixers.gla:GLA"
    chunk: ClassVar[int] = 64

    expand_k: Annotated[float, above(0)] = 0.5  # key channels of all heads, in multiples of the model's width
    gate_rank: Annotated[int, at_least(1)] = 16  # inner size of the projection to the decays
    gate_divisor: Annotated[float, above(0)] = 16.0  # divisor of the log decays: a larger one forgets less

    def transition(self, model: ModelSizes) -> int:
        return self.channels(model)[0]

    def state_shape(self, model: ModelSizes) -> tuple[int, int]:
        return self.head_sizes(model)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        keys, _ = self.channels(model)
        # every rank computes the decays' small input in full, and uses it for its own heads
        down = replace(linear(self.gate_rank, model.width, fp8=False), cuts=(), partial_gradient=True)
        return super().parameters(model) | {
            "gate_down.weight": down,
            "gate_up.weight": linear(keys, self.gate_rank, fp8=False),
            "gate_bias": Parameter((keys,), Constant(0.0), decay=False, fp32=True, cuts=(Cut(0),)),
        }

    def exported_names(self, model: ModelSizes) -> Names:
        """Return flash-linear-attention's names; its gk_proj is a pair of projections here."""
        return super().exported_names(model) | {
            "gk_down_proj.weight": ("gate_down.weight",),
            "gk_up_proj.weight": ("gate_up.weight",),
            "gk_up_proj.bias": ("gate_bias",),
        }

    def activation_values(self, model: ModelSizes) -> int:
        # in fp32 the decays' input and their logarithms; the small projection
        return super().activation_values(model) + 2 * model.wide * self.channels(model)[0] + self.gate_rank
