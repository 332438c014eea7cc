"""The time mix of RWKV-6 (Finch): a state per head, with data-dependent decays and token shifts.

Peng et al. 2024, "Eagle and Finch". x is a token's input and x' the previous token's input. The time mix first
interpolates x and x' in five ways, the *streams*. The streams r, k and v are the inputs to queries, keys and values.
The stream w is the input to the decays, and g is the input to the output gate. `up`, `down`, `decay_up` and
`decay_down` are projections. y is a head's output, and h its state, a matrix with one row per key channel:

    m = up(tanh(down(x + mix_input (x' - x))))                one vector m_s for each of the five streams s
    x_s = x + (mix_s + m_s) (x' - x)                          s in r, w, k, v, g
    r, k, v, z = r_proj(x_r), k_proj(x_k), v_proj(x_v), g_proj(x_g)
    d = -exp(decay_bias + decay_up(tanh(decay_down(x_w))))    log decays, one per key channel
    y_t = (h_{t-1} + diag(bonus) k_t v_t^T)^T r_t;   h_t = diag(exp(d_t)) h_{t-1} + k_t v_t^T
    out_proj(norm(y) * silu(z))                               LayerNorm per head, weight and bias per channel

Weights are initialised as in the authors' code. The initial values depend on the layer's index among the layers with
this mixer.
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
    supports_context_parallel: ClassVar[bool] = True
    width_option: ClassVar[str] = "head_dim"

    head_dim: Annotated[int, at_least(1)] = 64  # key channels, and value channels, per head
    mix_rank: Annotated[int, at_least(1)] = 32  # inner size of the low-rank projection to each stream's mix m_s
    decay_rank: Annotated[int, at_least(1)] = 64  # inner size of the low-rank projection to the decays
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
            f"{name}_proj.weight": replace(
                linear(width, width, cut=of_heads, heads=(self.num_heads(model),)), init=Orthogonal(length)
            )
            for name, length in lengths.items()
        }
        return {
            **self._mixes(model),
            **projections,
            # every rank computes all `decay_rank` outputs, and uses them for its own heads
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
        """Return the parameters that interpolate a token with the previous token, for the five streams."""
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
        """Return the weights' names in flash-linear-attention."""
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
        # the recurrence of gated linear attention; in addition the token's own contribution: v times the sum over the
        # key channels of r * bonus * k
        scan = 4 * chunk * width + 4 * width * self.head_dim + 4 * width
        return super().flops(model, seq_len) | {"low_rank": 2 * small, self.kind: scan}

    def activation_values(self, model: ModelSizes) -> int:
        # on every rank for all channels: x' - x, the five mixes and five streams. For the rank's own channels: k; v; r,
        # shifted by a token; z; silu(z); the normed output, and its product with silu(z). In fp32: r, k and v for the
        # token's own contribution; r times bonus; the decays and log decays; the norm's input and output
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
