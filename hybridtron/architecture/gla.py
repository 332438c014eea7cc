"""Gated linear attention (GLA): a state per head, with a data-dependent decay per key channel. Yang et al. 2024.

    g = log sigmoid(gate_up(gate_down(u)) + gate_bias) / gate_divisor
    h_t = diag(exp(g_t)) h_{t-1} + k_t v_t^T;   y_t = h_t^T q_t / sqrt(key channels of a head)

u is the mixer's input. g_t has one log decay per key channel; h is a head's state, a matrix with one row per key
channel. `linear_attention.py` describes the projections to q, k and v, the norm and the output gate. Samba's Sliding
GLA combines GLA with window attention, and has 384 value channels per head.
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
    gate_rank: Annotated[int, at_least(1)] = 16  # inner size of the low-rank projection to the decays
    gate_divisor: Annotated[float, above(0)] = 16.0  # divisor of the log decays; larger: slower decay

    def transition(self, model: ModelSizes) -> int:
        return self.channels(model)[0]

    def state_shape(self, model: ModelSizes) -> tuple[int, int]:
        return self.head_sizes(model)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        keys, _ = self.channels(model)
        # every rank computes all `gate_rank` outputs, and uses them for its own heads
        down = replace(linear(self.gate_rank, model.width, fp8=False), cuts=(), partial_gradient=True)
        return super().parameters(model) | {
            "gate_down.weight": down,
            "gate_up.weight": linear(keys, self.gate_rank, fp8=False, inner=True),
            "gate_bias": Parameter((keys,), Constant(0.0), decay=False, fp32=True, cuts=(Cut(0),)),
        }

    def exported_names(self, model: ModelSizes) -> Names:
        """Return the weights' names in flash-linear-attention.

        There, gk_proj is a sequence of two projections. Exports name these gk_down_proj and gk_up_proj.
        """
        return super().exported_names(model) | {
            "gk_down_proj.weight": ("gate_down.weight",),
            "gk_up_proj.weight": ("gate_up.weight",),
            "gk_up_proj.bias": ("gate_bias",),
        }

    def activation_values(self, model: ModelSizes) -> int:
        # the decays' logits, and the log decays in fp32; the output of gate_down, whole on every rank
        decays = (1 + model.wide) * self.channels(model)[0]
        return super().activation_values(model) + decays + self.gate_rank * model.tensor
