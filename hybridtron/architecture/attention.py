"""Softmax attention with rotary positions: full or sliding window, with grouped key/value heads.

    q, k, v = u W_q, u W_k, u W_v [-> silu(conv(.)) where `conv` is set]
    q, k -> RMSNorm [where `qk_norm` is set] -> RoPE, on all channels or on the first `rotary_dim` of each head
    y = out(softmax(scale q k^T) v [* sigmoid(u W_g) where `gate` is set])

u is the mixer's input, and y is its output. conv is a short causal convolution along the tokens, separate for each
channel. `scale` is head_dim^-0.5 by default. With a window of w a token sees itself and the w - 1 tokens before it.
Grouped-query attention has fewer `kv_heads` than `heads`; multi-query attention has a single key/value head.

Published models use the options in these ways:

    Samba, Table 8       `conv`, a short convolution on q, k and v
    mamba2attn-2.7b      `conv` with a bias and without SiLU; rotates only a head's first `rotary_dim` channels
    OLMo-Hybrid          `qk_norm: all`, an RMSNorm over the queries of all heads together, and likewise over the keys
    Qwen3-Next           `qk_norm: head`, an RMSNorm over each head; `gate`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from hybridtron.architecture.base import Cut, MixerSpec, ModelSizes, Names, Parameter, StatePart, linear, output_linear
from hybridtron.architecture.inits import Constant, Uniform
from hybridtron.architecture.rope import NO_POSITIONS, PLAIN, RopeOptions, SelfExtendOptions, with_rope
from hybridtron.limits import above, at_least, divisors_near, one_of
from hybridtron.problems import Problem, choice


def visible_tokens(seq_len: int, window: int | None) -> float:
    """Return the mean number of tokens that a token sees under causal attention, itself included."""
    if window is None or seq_len <= window:
        return (seq_len + 1) / 2
    return window - window * (window - 1) / (2 * seq_len)


class ReadingAttention(StrEnum):
    """The attention in an evaluation: full attention, or the attention that the model was trained with."""

    full = "full"
    trained = "trained"


@dataclass(frozen=True)
class HeadsSpec(MixerSpec):
    """Shared base for mixers with queries, keys and values: heads, projections, convolutions and positions.

    `kv_heads` defaults to `heads`, and `head_dim` to width / heads.
    """

    width_option: ClassVar[str] = "heads"
    projects_input: ClassVar[bool] = True
    supports_mup: ClassVar[bool] = True
    reading: ClassVar[Mapping[ReadingAttention, Mapping[str, Any]]]  # choice -> options to override in an evaluation

    heads: Annotated[int, at_least(1)] = 1  # query heads
    kv_heads: Annotated[int | None, at_least(1)] = None  # key/value heads; null: heads
    # channels of a head; null: width / heads
    head_dim: Annotated[int | None, at_least(1, "leave it out for width / heads")] = None
    # rotary positions: {base, scale, factor, original}; none: no positions
    rope: Annotated[RopeOptions | str, one_of((NO_POSITIONS,))] = PLAIN
    rotary_dim: int | None = None  # channels of a head that rotary positions rotate; null: all
    # taps of a short convolution on queries, keys and values; null: none
    conv: Annotated[int | None, at_least(2, "leave it out for none")] = None
    conv_bias: bool = False  # the short convolution has a bias
    conv_silu: bool = True  # SiLU follows the short convolution
    # RMSNorm of queries and of keys. head: over each head separately, with one weight vector for all heads; all: over
    # all heads together
    qk_norm: Annotated[str, one_of(("none", "head", "all"))] = "none"
    norm_eps: Annotated[float, above(0)] = 1e-5  # added to the mean square in the norm of queries and keys
    # factor of q k^T before the softmax; null: head_dim^-0.5
    scale: Annotated[float | None, above(0)] = None
    gate: bool = False  # multiply the heads' output by the sigmoid of one more projection of the input

    def __post_init__(self) -> None:
        if isinstance(self.rope, Mapping):  # from YAML or config.json
            object.__setattr__(self, "rope", RopeOptions(**self.rope))

    @classmethod
    def renamed(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return with_rope(options)

    @property
    def positions(self) -> RopeOptions | None:
        """Rotary positions, or None without positions."""
        if isinstance(self.rope, RopeOptions):
            return self.rope
        return None

    def query_factor(self, head_dim: int) -> float:
        """Return the factor by which queries are multiplied to get `scale`.

        The attention op itself multiplies q k^T by head_dim^-0.5.
        """
        if self.scale is None:
            return 1.0
        return self.scale * head_dim**0.5

    @property
    def growing_heads(self) -> tuple[str, ...]:
        if self.head_dim is None:
            return ()  # each head's channels grow instead
        if self.kv_heads in (None, 1):  # multi-query attention has one key/value head at every width
            return ("heads",)
        return ("heads", "kv_heads")

    def mup_problems(self, model: ModelSizes, base: Self, base_model: ModelSizes) -> Iterator[Problem]:
        if self.scale is not None and self.head(model) != base.head(base_model):
            yield Problem(
                "scale",
                "conflict",
                f"is {self.scale}, but model.mup sets it, because heads have {base.head(base_model)} channels at the "
                f"base width and {self.head(model)} in this model: leave scale out, or set head_dim",
            )

    def with_mup(self, model: ModelSizes, base: Self, base_model: ModelSizes) -> Self:
        head = self.head(model)
        base_head = base.head(base_model)
        if head == base_head:
            return self
        return replace(self, scale=base_head**0.5 / head)

    def groups(self) -> int:
        return self.kv_heads or self.heads

    def head(self, model: ModelSizes) -> int:
        return self.head_dim or self.input_width(model) // self.heads

    def rotary(self, model: ModelSizes) -> int:
        """Return how many channels in a head are rotated by rotary positions."""
        return self.rotary_dim or self.head(model)

    def channels(self, model: ModelSizes) -> tuple[int, int]:
        """Return the total width of all query heads, and of all key (or value) heads."""
        return self.heads * self.head(model), self.groups() * self.head(model)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        queries, keys = self.channels(model)
        input_width = self.input_width(model)
        # Queries have a weight of their own, because ranks divide it differently from the weight for keys and values:
        # if ranks can't divide the key/value heads evenly, every rank holds all key/value heads.
        head = linear(queries, input_width, cut=Cut(0, unit=self.head(model)), heads=(self.heads,))
        pair = (("k", keys), ("v", keys))
        shared = Cut(0, unit=self.head(model), replicate=True)
        of_pair = (self.groups(), self.groups())
        heads_kv = replace(
            head, shape=(2 * keys, input_width), parts=pair, heads=of_pair, cuts=(shared,), partial_gradient=True
        )
        table = {
            "q.weight": head,
            "kv.weight": heads_kv,
            "out.weight": output_linear(model.width, queries, model.num_sublayers),
        }
        if self.gate:
            table["gate.weight"] = head
        if self.qk_norm == "head":
            size = Parameter((self.head(model),), Constant(1.0), decay=False, partial_gradient=True)
            table |= {"q_norm_weight": size, "k_norm_weight": size}
        elif self.qk_norm == "all":
            size = Parameter((queries,), Constant(1.0), decay=False, cuts=head.cuts)
            table["q_norm_weight"] = size
            table["k_norm_weight"] = replace(size, shape=(keys,), cuts=(shared,), partial_gradient=True)
        if self.conv:
            short = {"q_conv": (head, queries), "kv_conv": (heads_kv, 2 * keys)}
            for name, (projection, channels) in short.items():
                taps = Parameter(
                    (channels, self.conv),
                    Uniform(self.conv**-0.5),
                    parts=projection.parts,
                    cuts=projection.cuts,
                    partial_gradient=projection.partial_gradient,
                )
                table[name] = taps
                if self.conv_bias:
                    table[f"{name}_bias"] = replace(taps, shape=(channels,), decay=False)
        return table

    def exported_names(self, model: ModelSizes) -> Names:
        names: Names = {
            "q_proj.weight": ("q.weight",),
            "k_proj.weight": ("kv.weight.k",),
            "v_proj.weight": ("kv.weight.v",),
            "o_proj.weight": ("out.weight",),
        }
        if self.gate:
            names["g_proj.weight"] = ("gate.weight",)
        if self.qk_norm != "none":
            names |= {f"{part}_norm.weight": (f"{part}_norm_weight",) for part in "qk"}
        used = [("weight", "")] * (self.conv is not None) + [("bias", "_bias")] * self.conv_bias
        for theirs, ours in used:
            names |= {
                f"q_conv1d.{theirs}": (f"q_conv{ours}",),
                f"k_conv1d.{theirs}": (f"kv_conv{ours}.k",),
                f"v_conv1d.{theirs}": (f"kv_conv{ours}.v",),
            }
        return names

    def exported_options(self, model: ModelSizes) -> dict[str, Any]:
        return super().exported_options(model) | {"kv_heads": self.groups(), "head_dim": self.head(model)}

    def activation_values(self, model: ModelSizes) -> int:
        queries, keys = self.channels(model)
        # q, k, v; with a convolution also its inputs; the heads' output; and one fp32 element per head (log-sum-exp).
        # With rotary positions, the keys before rotation stay in memory too, because they share a tensor with the
        # values. Gathered copies of keys don't count: an op that gathers keys gathers them again in the backward pass.
        unrotated = keys if self.positions is not None else 0
        # with a gate: its logits, its sigmoid and the gated output; with `qk_norm`: queries and keys before their norm
        beside = 3 * queries * self.gate + (queries + keys) * (self.qk_norm != "none")
        return (queries + 2 * keys) * (2 if self.conv else 1) + unrotated + queries + model.wide * self.heads + beside

    def carried_heads(self, model: ModelSizes, tokens: int | None) -> dict[str, StatePart]:
        """Return the state parts: keys, values, how many tokens they cover, and the convolutions' last inputs.

        `tokens` is the maximum number of tokens whose keys and values are kept; with None all are kept.
        """
        queries, keys = self.channels(model)
        heads = (tokens, self.groups(), self.head(model))
        parts = {
            "keys": StatePart("kv", heads, cuts=(Cut(1, readers=self.heads),)),
            "values": StatePart("kv", heads, cuts=(Cut(1, readers=self.heads),)),
            "length": StatePart("kv", (), "int64"),
        }
        if self.conv:
            parts["q_conv"] = StatePart("conv", (self.conv - 1, queries), cuts=(Cut(1),))
            parts["kv_conv"] = StatePart(
                "conv",
                (self.conv - 1, 2 * keys),
                parts=(keys, keys),
                cuts=(Cut(1, unit=self.head(model), replicate=True),),
            )
        return parts

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        if self.head_dim is None and (input_width := self.input_width(model)) % self.heads:
            fitting = f"{choice(divisors_near(input_width, self.heads))}, or set head_dim"
            what = "twice " * self.feeds_next + f"model.width={model.width}"
            yield Problem("heads", "not-divisible", f"is {self.heads}, must divide {what}: {fitting}")
        elif self.positions is not None:
            yield from self._rotary_problems(model)
        if self.positions is not None:
            yield from (problem.below("rope") for problem in self.positions.problems())
        if self.heads % self.groups():
            fitting = choice(divisors_near(self.heads, self.groups()))
            yield Problem("kv_heads", "not-divisible", f"is {self.kv_heads}, must divide heads={self.heads}: {fitting}")
        if self.conv is None and (self.conv_bias or not self.conv_silu):
            name = "conv_bias" if self.conv_bias else "conv_silu"
            yield Problem(
                name, "needs-other-key", f"is {getattr(self, name)}, but there is no convolution: set conv, or leave it"
            )

    def _rotary_problems(self, model: ModelSizes) -> Iterator[Problem]:
        """Yield a problem if the rotated channels can't be divided into pairs, or are more than a head has."""
        head = self.head(model)
        if self.rotary_dim is None:
            if head % 2:
                yield Problem("head_dim", "not-divisible", f"is {head}, must be even for rotary positions")
        elif self.rotary_dim % 2 or not 2 <= self.rotary_dim <= head:
            limits = f"must be even, and from 2 to the head's {head} channels"
            yield Problem("rotary_dim", "out-of-range", f"is {self.rotary_dim}, {limits}")


@dataclass(frozen=True)
class AttentionSpec(HeadsSpec):
    """Options for softmax attention. Without a `window` a token sees itself and all tokens before it."""

    kind: ClassVar[str] = "attention"
    module: ClassVar[str] = "hybridtron.mixers.attention:Attention"
    supports_context_parallel: ClassVar[bool] = True
    reading: ClassVar[Mapping[ReadingAttention, Mapping[str, Any]]] = {
        ReadingAttention.full: {"window": None},
        ReadingAttention.trained: {},
    }

    # tokens that a token sees, itself included; null: full attention
    window: Annotated[int | None, at_least(2, "leave it out for full attention")] = None
    # outside training, group the positions of far keys (Self-Extend): {group: 4, neighbours: 1024}; null: off
    self_extend: SelfExtendOptions | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.self_extend, Mapping):
            object.__setattr__(self, "self_extend", SelfExtendOptions(**self.self_extend))

    @property
    def attention_at_eval(self) -> str:
        if self.self_extend is not None:
            return f"full, self-extended by {self.self_extend.group} beyond {self.self_extend.neighbours}"
        if self.window is None:
            return "full"
        return f"window {self.window}"

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        num_visible = visible_tokens(seq_len, self.window)
        return super().flops(model, seq_len) | {"attention": 4 * self.channels(model)[0] * num_visible}

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        return self.carried_heads(model, None if self.window is None else self.window - 1)

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from super().problems(model, max_seq_len)
        if self.window is not None and self.window > max_seq_len:
            longest = f"larger than the longest sequence of any phase ({max_seq_len})"
            cure = f"leave it out for full attention, or use at most {max_seq_len}"
            yield Problem("window", "out-of-range", f"is {self.window}, {longest}: {cure}")
        if self.self_extend is not None and (self.window is not None or self.positions is None):
            if self.window is not None:
                why = f"window={self.window}"
            else:
                why = "rope=none"
            yield Problem(
                "self_extend", "conflict", f"is for full attention with rotary positions, not for {why}: leave it out"
            )
