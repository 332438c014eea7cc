"""MLP without a gate: down(relu(up(u))^2), without biases, as in Nemotron-H.

u is the input; `up` and `down` are projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from hybridtron.architecture.base import MixerSpec, ModelSizes, Names, Parameter, linear, output_linear
from hybridtron.limits import at_least


@dataclass(frozen=True)
class SquaredReLUSpec(MixerSpec):
    """Options of an MLP with squared ReLU."""

    kind: ClassVar[str] = "squared_relu"
    module: ClassVar[str] = "hybridtron.mixers.squared_relu:SquaredReLU"
    supports_context_parallel: ClassVar[bool] = True
    supports_mup: ClassVar[bool] = True
    width_option: ClassVar[str] = "hidden"
    projects_input: ClassVar[bool] = True

    # inner channels; must be set
    hidden: Annotated[int, at_least(1, "4 times model.width is usual")] = 0

    @property
    def growing_sizes(self) -> tuple[str, ...]:
        return ("hidden",)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        return {
            "up.weight": linear(self.hidden, model.width),
            "down.weight": output_linear(model.width, self.hidden, model.num_sublayers),
        }

    def exported_names(self, model: ModelSizes) -> Names:
        return {"up_proj.weight": ("up.weight",), "down_proj.weight": ("down.weight",)}

    def activation_values(self, model: ModelSizes) -> int:
        return 2 * self.hidden  # up(u) or its ReLU, and the square
