"""The time mix of RWKV-6 (Finch): a state per head, with data-dependent decays and token shifts.

Peng et al. 2024, "Eagle and Finch". With x' the token before x:

    m = up(tanh(down(x + mix_input (x' - x))))                one m for each of five streams
    x_s = x + (mix_s + m_s) (x' - x)                          s in r, w, k, v, g
    r, k, v, z = r_proj(x_r), k_proj(x_k), v_proj(x_v), g_proj(x_g)
    g = -exp(decay_bias + decay_up(tanh(decay_down(x_w))))    log decays, of each key channel
    y_t = (h_{t-1} + diag(bonus) k_t v_t^T)^T r_t;   h_t = diag(exp(g_t)) h_{t-1} + k_t v_t^T
    out_proj(norm(y) * silu(z))                               LayerNorm of each head, weight and bias by channel

Weights are initialised as in the public code, which depends on the layer's index among those of its kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from hybridtron.architecture.base import Cut, MixerSpec, ModelSizes, Names, Parameter, StatePart, linear
from hybridtron.architecture.gla import GLASpec
from hybridtron.architecture.inits import Constant, Orthogonal, Ramp, Rows, Uniform
from hybridtron.architecture.token_shift import last_token, mix, mix_start
from hybridtron.limits import above, at_least, divisors_near
from hybridtron.problems import Problem, choice

STREAMS = ("r", "w", "k", "v", "g")


@dataclass(frozen=True)
class RWKV6Spec(MixerSpec):
    """Options of an RWKV-6 time mix."""

    kind: ClassVar[str] = "rwkv6"
    module: ClassVar[str] = "hybridtron.mixers.rwkv6:RWKV6"
    hands_over: ClassVar[bool] = True
    width_option: ClassVar[str] = "head_dim"

    head_dim: Annotated[int, at_least(1)] = 64  # key channels, and value channels, per head
    mix_rank: Annotated[int, at_least(1)] = 32  # inner size of the projection to each stream's mix
    decay_rank: Annotated[int, at_least(1)] = 64  # inner size of the projection to the decays
    norm_eps: Annotated[float, above(0)] = 64e-5  # added to the variance in each head's norm

    def num_heads(self, model: ModelSizes) -> int:
        return model.width // self.head_dim

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width = model.width
        depth = model.nth_of_kind / max(1, model.layers_of_kind - 1)
        of_heads = Cut(0, unit=self.head_dim)
        norm = ((model.nth_of_kind + 1) / model.layers_of_kind) ** 0.7
        lengths = {"r": 1.0, "k": 0.1, "v": 1.0, "g": 0.1}
        small = replace(linear(self.decay_rank, width, fp8=False), decay=False)
        out = linear(width, width, cut=Cut(1, unit=self.head_dim))
        projections = {
            f"{name}_proj.weight": replace(linear(width, width, cut=of_heads), init=Orthogonal(length))
            for name, length in lengths.items()
        }
        return {
            **self._mixes(model),
            **projections,
            # every rank computes the decays' small input in full, and uses it for its own heads
            "decay_down.weight": replace(small, init=Constant(0.0), cuts=(), partial_gradient=True),
            "decay_up.weight": replace(small, shape=(width, self.decay_rank), init=Uniform(0.01), cuts=(of_heads,)),
            "decay_bias": Parameter(
                (width,), Ramp(-6.0, -1.0, 0.7 + 1.3 * depth), decay=False, fp32=True, cuts=(of_heads,)
            ),
            "bonus": Parameter(
                (self.num_heads(model), self.head_dim),
                Ramp(depth, 0.0, zigzag=0.1),
                decay=False,
                fp32=True,
                cuts=(Cut(0),),
            ),
            "norm_weight": Parameter((width,), Constant(norm), decay=False, cuts=(of_heads,)),
            "norm_bias": Parameter((width,), Constant(0.0), decay=False, cuts=(of_heads,)),
            "out_proj.weight": replace(out, init=Orthogonal(0.0)),
        }

    def _mixes(self, model: ModelSizes) -> dict[str, Parameter]:
        """Return the parameters that mix a token with the previous one, for five streams."""
        depth = model.nth_of_kind / max(1, model.layers_of_kind - 1)
        inner = len(STREAMS) * self.mix_rank
        slow = mix_start(model)
        fast = mix_start(model, power=0.5)
        starts = {"r": fast, "w": slow, "k": slow, "v": mix_start(model, less=0.3 * depth), "g": fast}
        return {
            "mix_input": mix(model, start=slow),
            "mix_down.weight": replace(mix(model, inner, start=Constant(0.0)), projection=True),
            "mix_up": Parameter((model.width, inner), Uniform(0.01), decay=False, partial_gradient=True),
            "mix": mix(model, len(STREAMS), start=Rows(tuple(starts[stream] for stream in STREAMS))),
        }

    def exported_names(self, model: ModelSizes) -> Names:
        """Return flash-linear-attention's names."""
        return {
            "x_proj.0.mu": ("mix_input",),
            "x_proj.0.linear.weight": ("mix_down.weight",),
            "x_proj.2.weight": ("mix_up",),
            "x_bias": ("mix",),
            **{f"{name}_proj.linear.weight": (f"{name}_proj.weight",) for name in "rkvg"},
            "w_proj.linear.lora.0.weight": ("decay_down.weight",),
            "w_proj.linear.lora.2.weight": ("decay_up.weight",),
            "w_proj.linear.lora.2.bias": ("decay_bias",),
            "bonus": ("bonus",),
            "g_norm.weight": ("norm_weight",),
            "g_norm.bias": ("norm_bias",),
            "o_proj.weight": ("out_proj.weight",),
        }

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        width = model.width
        chunk = min(GLASpec.chunk, seq_len)
        small = 2 * len(STREAMS) * self.mix_rank * width + 2 * self.decay_rank * width
        # as gated linear attention, and the token's own values by r, bonus and k
        scan = 4 * chunk * width + 4 * width * self.head_dim + 4 * width
        return super().flops(model, seq_len) | {"low_rank": 2 * small, self.kind: scan}

    def activation_values(self, model: ModelSizes) -> int:
        # the difference to the token before, mixes and streams; k and v in rows, r of the next tokens, z, the gate, the
        # normed output and their product; in fp32 r, k and v for the token itself, r by bonus, the decays' exponential
        # and their logarithms, the norm's input and output
        whole = (1 + 2 * len(STREAMS)) * model.tensor
        return (whole + 7 + 8 * model.wide) * model.width

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        heads = self.num_heads(model)
        shape = (heads, self.head_dim, self.head_dim)
        state = StatePart("ssm", shape, "float32", heads, cuts=(Cut(0),), transition=model.width)
        return {"ssm": state, "shift": last_token(model)}

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        if model.width % self.head_dim:
            fitting = choice(divisors_near(model.width, self.head_dim))
            yield Problem(
                "head_dim", "not-divisible", f"is {self.head_dim}, must divide model.width={model.width}: {fitting}"
            )
