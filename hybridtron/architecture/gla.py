"""Gated linear attention: a state per head whose key channels decay each at a rate of its own. Yang et al. 2024.

    q, k, v, z = in_proj(u) [q, k, v -> silu(conv(.)) where `conv` is set];   g = log sigmoid(up(down(u)) + bias) / 16
    h_t = diag(exp(g_t)) h_{t-1} + k_t v_t^T;   y_t = h_t^T q_t / sqrt(key channels of a head)
    out_proj(norm(y) * silu(z))                               RMSNorm over a head's values, one weight for all heads

Samba's Sliding GLA has it beside window attention, with heads of 384 values. `conv` is the short convolution of its
Table 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hybridtron.architecture.base import (
    Constant,
    Cut,
    MixerSpec,
    ModelSizes,
    Names,
    Parameter,
    Projection,
    StatePart,
    Uniform,
    linear,
    output_linear,
)
from hybridtron.limits import above, at_least, divisors_near
from hybridtron.problems import Problem, choice

CHUNK = 64
"""Tokens that see each other through a matrix, for the FLOP count."""


@dataclass(frozen=True)
class GLASpec(MixerSpec):
    """Options of a GLA mixer. FLOPs are those of the chunked form with whole CHUNK x CHUNK tiles."""

    kind: ClassVar[str] = "gla"
    module: ClassVar[str] = "hybridtron.mixers.gla:GLA"
    width_option: ClassVar[str] = "heads"

    heads: Annotated[int, at_least(1)] = 4  # heads, each with a state of its own
    expand_k: Annotated[float, above(0)] = 0.5  # key channels of all heads, in multiples of the model's width
    expand_v: Annotated[float, above(0)] = 1.0  # value channels of all heads, in multiples of the model's width
    gate_rank: Annotated[int, at_least(1)] = 16  # inner size of the projection to the decays
    gate_divisor: Annotated[float, above(0)] = 16.0  # what the log decays are divided by: larger forgets less
    # taps of a short convolution on queries, keys and values; null: none
    conv: Annotated[int | None, at_least(2, "leave it out for none")] = None
    norm_eps: Annotated[float, above(0)] = 1e-5  # added to the mean square in the norm of a head

    def channels(self, model: ModelSizes) -> tuple[int, int]:
        """Key and value channels of all heads."""
        return round(self.expand_k * model.width), round(self.expand_v * model.width)

    def head_sizes(self, model: ModelSizes) -> tuple[int, int]:
        """Key and value channels of one head."""
        keys, values = self.channels(model)
        return keys // self.heads, values // self.heads

    def convolved(self, model: ModelSizes) -> tuple[tuple[str, int], ...]:
        """What the short convolution goes over."""
        keys, values = self.channels(model)
        return ("q", keys), ("k", keys), ("v", values)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width, (keys, values), (_, head) = model.width, self.channels(model), self.head_sizes(model)
        projected = (*self.convolved(model), ("z", values))
        # every rank makes the small input of the decays whole, and uses it for its own heads
        down = Parameter((self.gate_rank, width), Projection(width**-0.5), partial_gradient=True)
        table = {
            "in_proj.weight": linear(2 * (keys + values), width, parts=projected),
            "gate_down.weight": down,
            "gate_up.weight": linear(keys, self.gate_rank, fp8=False),
            "gate_bias": Parameter((keys,), Constant(0.0), decay=False, fp32=True, cuts=(Cut(0),)),
            "norm_weight": Parameter((head,), Constant(1.0), decay=False, partial_gradient=True),
            "out_proj.weight": output_linear(width, values, model.num_sublayers),
        }
        if self.conv:
            shape, taps = (2 * keys + values, self.conv), Uniform(self.conv**-0.5)
            table["conv_weight"] = Parameter(shape, taps, cuts=(Cut(0),), parts=self.convolved(model))
        return table

    def exported_names(self, model: ModelSizes) -> Names:
        """As flash-linear-attention has them, where each projection is one of its own; its gk_proj is a pair here."""
        names: Names = {
            "gk_down_proj.weight": ("gate_down.weight",),
            "gk_up_proj.weight": ("gate_up.weight",),
            "gk_up_proj.bias": ("gate_bias",),
            "g_norm_swish_gate.weight": ("norm_weight",),
            "g_proj.weight": ("in_proj.weight.z",),
            "o_proj.weight": ("out_proj.weight",),
        }
        for part, _ in self.convolved(model):
            names[f"{part}_proj.weight"] = (f"in_proj.weight.{part}",)
            if self.conv:
                names[f"{part}_conv1d.weight"] = (f"conv_weight.{part}",)
        return names

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        (keys, values), seen = self.channels(model), min(CHUNK, seq_len)
        # scores and their product with v inside a chunk; k v^T into the state, and q out of it
        return super().flops(model, seq_len) | {"gla": 2 * seen * (keys + values) + 4 * keys * values // self.heads}

    def activation_values(self, model: ModelSizes) -> int:
        # q, k, v, z (the first three once more where a convolution stands between), the scan's output and the normed
        # one; in fp32 the decays' input and their logarithms, and a state every CHUNK tokens; the small projection
        keys, values = self.channels(model)
        convolved = 2 * keys + values if self.conv else 0
        state = 2 * keys * values // self.heads // CHUNK
        return 2 * keys + 4 * values + convolved + 4 * keys + state + self.gate_rank

    def whole_values(self, model: ModelSizes, tensor: int) -> int:
        return self.gate_rank

    def backward_values(self, model: ModelSizes) -> int:
        # at the scan: gradients of its output, q, k and v, and in fp32 of the log decays
        keys, values = self.channels(model)
        return 2 * keys + 2 * values + 2 * keys

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        parts = {"ssm": StatePart("ssm", (self.heads, *self.head_sizes(model)), "float32", self.heads, cuts=(Cut(0),))}
        if self.conv:
            sizes = tuple(size for _, size in self.convolved(model))
            parts["conv"] = StatePart("conv", (self.conv - 1, sum(sizes)), parts=sizes, cuts=(Cut(1),))
        return parts

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        for option, channels in zip(("expand_k", "expand_v"), self.channels(model), strict=True):
            if channels % self.heads:
                made = f"the {channels} channels that {option}={getattr(self, option)} makes"
                fitting = choice(divisors_near(channels, self.heads))
                yield Problem("heads", f"is {self.heads}, must divide {made}: {fitting}")
                return

    def layout_problems(self, model: ModelSizes, tensor: int) -> Iterator[Problem]:
        if self.heads % tensor:  # also where their channels could be shared out
            yield Problem("heads", f"is {self.heads}, which {tensor} ranks can't share evenly")
