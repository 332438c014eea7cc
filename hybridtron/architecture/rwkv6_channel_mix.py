"""The channel mix of RWKV-6 (Finch), which takes the place of an MLP.

    k = x + key_mix (x' - x);   r = x + receptance_mix (x' - x)
    y = sigmoid(receptance(r)) * value(relu(key(k))^2)

x is a token's input, x' is the previous token's input, and y is the output. `key`, `value` and `receptance` are
projections. The state that is carried to the next row is the last token's input. Weights are initialised as in the
authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from hybridtron.architecture.base import Cut, MixerSpec, ModelSizes, Names, Parameter, StatePart, linear
from hybridtron.architecture.inits import Orthogonal
from hybridtron.architecture.token_shift import last_token, mix, mix_start
from hybridtron.limits import at_least


@dataclass(frozen=True)
class RWKV6ChannelMixSpec(MixerSpec):
    """Options of an RWKV-6 channel mix."""

    kind: ClassVar[str] = "rwkv6_channel_mix"
    module: ClassVar[str] = "hybridtron.mixers.rwkv6_channel_mix:RWKV6ChannelMix"
    supports_context_parallel: ClassVar[bool] = True

    # inner channels; null: 3.5 times the model's width, rounded down to a multiple of 32
    hidden: Annotated[int | None, at_least(1)] = None

    def inner(self, model: ModelSizes) -> int:
        return self.hidden or max(32, model.width * 7 // 64 * 32)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width = model.width
        inner = self.inner(model)
        start = mix_start(model)
        return {
            "key_mix": mix(model, start=start),
            "receptance_mix": mix(model, start=start),
            "key.weight": replace(linear(inner, width), init=Orthogonal(1.0)),
            "receptance.weight": replace(linear(width, width), init=Orthogonal(0.0)),
            "value.weight": replace(linear(width, inner, cut=Cut(1)), init=Orthogonal(0.0)),
        }

    def exported_names(self, model: ModelSizes) -> Names:
        """Return the weights' names in flash-linear-attention."""
        return {
            "key.mu": ("key_mix",),
            "key.linear.weight": ("key.weight",),
            "receptance.mu": ("receptance_mix",),
            "receptance.linear.weight": ("receptance.weight",),
            "value.weight": ("value.weight",),
        }

    def exported_options(self, model: ModelSizes) -> dict[str, Any]:
        return super().exported_options(model) | {"hidden": self.inner(model)}

    def activation_values(self, model: ModelSizes) -> int:
        # k and r, which every tensor-parallel rank saves; relu(key(k)) and its square; the sigmoid, and value's output
        return 2 * self.inner(model) + (2 * model.tensor + 2) * model.width

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        return {"shift": last_token(model)}
