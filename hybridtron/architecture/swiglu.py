"""Gated MLP: down(silu(gate_multiplier * gate(u)) * up(u)), without biases.

u is the input; `gate`, `up` and `down` are projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from hybridtron.architecture.base import MixerSpec, ModelSizes, Names, Parameter, linear, output_linear
from hybridtron.limits import above, at_least


@dataclass(frozen=True)
class SwiGLUSpec(MixerSpec):
    """Options of a gated MLP."""

    kind: ClassVar[str] = "swiglu"
    module: ClassVar[str] = "hybridtron.mixers.swiglu:SwiGLU"
    supports_context_parallel: ClassVar[bool] = True
    supports_mup: ClassVar[bool] = True
    width_option: ClassVar[str] = "hidden"
    projects_input: ClassVar[bool] = True

    # inner channels; must be set
    hidden: Annotated[int, at_least(1, "8/3 of model.width is usual")] = 0
    gate_multiplier: Annotated[float, above(0)] = 1.0  # factor of the gate before SiLU, as in Falcon-H1

    @property
    def growing_sizes(self) -> tuple[str, ...]:
        return ("hidden",)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        return {
            "gate_up.weight": linear(2 * self.hidden, model.width, parts=(("gate", self.hidden), ("up", self.hidden))),
            "down.weight": output_linear(model.width, self.hidden, model.num_sublayers),
        }

    def exported_names(self, model: ModelSizes) -> Names:
        return {
            "gate_proj.weight": ("gate_up.weight.gate",),
            "up_proj.weight": ("gate_up.weight.up",),
            "down_proj.weight": ("down.weight",),
        }

    def activation_values(self, model: ModelSizes) -> int:
        return 3 * self.hidden  # gate(u), up(u), and the input of `down`
