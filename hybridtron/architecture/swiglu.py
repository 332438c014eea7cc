"""Gated MLP: down(silu(gate(u)) * up(u)), without biases. It carries no state and sees one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridtron.architecture.base import MixerSpec, ModelSizes, Names, Parameter, linear, output_linear
from hybridtron.problems import Problem


@dataclass(frozen=True)
class SwiGLUSpec(MixerSpec):
    """Options of a gated MLP: `hidden` is the width between its projections."""

    kind: ClassVar[str] = "swiglu"
    module: ClassVar[str] = "hybridtron.mixers.swiglu:SwiGLU"
    width_option: ClassVar[str] = "hidden"

    hidden: int = 0  # inner channels; must be set

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

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        return {"projections": 6 * model.width * self.hidden}

    def activation_values(self, model: ModelSizes) -> int:
        return 3 * self.hidden

    def layout_problems(self, model: ModelSizes, tensor: int) -> list[Problem]:
        if self.hidden % tensor == 0:
            return []
        return [Problem("hidden", f"is {self.hidden}, which {tensor} ranks can't share evenly")]

    def problems(self, model: ModelSizes, max_seq_len: int) -> list[Problem]:
        if self.hidden < 1:
            usual = 8 * model.width // 3
            return [Problem("hidden", f"is {self.hidden}, must be set to the MLP's inner width, e.g. {usual}")]
        return []
