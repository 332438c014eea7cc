"""Attention and an MLP, with weights that all sub-layers of a letter share, as in Zamba2. Glorioso et al. 2024.

    u = RMSNorm([x, e])                     x is the residual stream, e is the token embedding; they are concatenated
    q, k, v = u (W_q + A_q B_q), ...        with `adapt_attention`; otherwise u W_q, ...
    a = out(softmax(q k^T / sqrt(head_dim / 2)) v)            with the rotary positions and windows from `attention.py`
    gate, up = RMSNorm(a) (W_gate_up + A B)
    t = linear(down(gelu(gate) * up))

The block has no residual connection, and its output t is not added to the stream. Only the next sub-layer reads t: its
input is RMSNorm(x + t), and it adds its own output to x.

Each sub-layer has its own `linear` and its own low-rank pairs A and B. All other weights exist once per letter in the
layer pattern, so a model with two alternating sets of shared weights has two letters. The low-rank pairs belong to the
model, unlike the adapters (`adapters.py`) that a training phase may add.

No weight in the block is in FP8: FP8 is switched on for single layers, but shared weights belong to several layers.

This file has two kinds of mixer with the same weights: `shared_attention` with the attention from `attention.py`, and
`shared_span` with the attention from `span.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from hybridtron.architecture.attention import AttentionSpec, HeadsSpec
from hybridtron.architecture.base import Cut, ModelSizes, Names, Parameter, linear, output_linear
from hybridtron.architecture.inits import Constant, Orthogonal
from hybridtron.architecture.span import SpanSpec
from hybridtron.limits import at_least
from hybridtron.problems import Problem


@dataclass(frozen=True)
class SharedBlockSpec(HeadsSpec):
    """Options for the shared MLP and for each sub-layer's own weights; `HeadsSpec` has the attention's options."""

    feeds_next: ClassVar[bool] = True
    projects_input: ClassVar[bool] = False  # the projections read the output of a norm

    # inner channels of the MLP; must be set
    hidden: Annotated[int, at_least(1, "4 times model.width is usual")] = 0
    rank: Annotated[int, at_least(1)] = 128  # inner width of each sub-layer's low-rank pairs
    adapt_attention: bool = False  # low-rank pairs for queries, keys and values, in addition to the MLP's pairs

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width = model.width
        hidden = self.hidden
        queries = self.channels(model)[0]
        scale = Parameter((width,), Constant(1.0), decay=False, sequence_partial=True)
        table = super().parameters(model) | {
            "out.weight": linear(width, queries, cut=Cut(1)),
            "in_norm.weight": replace(scale, shape=(self.input_width(model),)),
            "mlp_norm.weight": scale,
            "gate_up.weight": linear(2 * hidden, width, parts=(("gate", hidden), ("up", hidden))),
            "down.weight": linear(width, hidden, cut=Cut(1)),
        }
        unshared = {"linear.weight": output_linear(width, width, model.num_sublayers), **self._pairs(model, table)}
        shared = {name: replace(weight, shared=True) for name, weight in table.items()}
        return {name: replace(weight, fp8=False) for name, weight in (shared | unshared).items()}

    def _pairs(self, model: ModelSizes, table: dict[str, Parameter]) -> dict[str, Parameter]:
        """Return name -> weight for the low-rank pairs. A is full on each rank; B is sharded like its projection."""
        beside = {"gate_up": table["gate_up.weight"]}
        if self.adapt_attention:
            keys = self.channels(model)[1]
            kv_weight = table["kv.weight"]
            half_weight = replace(kv_weight, shape=(keys, kv_weight.shape[1]), parts=(), heads=())
            beside |= {"q": table["q.weight"], "k": half_weight, "v": half_weight}
        pairs = {}
        for name, weight in beside.items():
            rows, inputs = weight.shape
            pairs[f"{name}_A.weight"] = replace(linear(self.rank, inputs), cuts=(), partial_gradient=True)
            pairs[f"{name}_B.weight"] = replace(weight, shape=(rows, self.rank), init=Orthogonal(0.0), heads=())
        return pairs

    @property
    def growing_sizes(self) -> tuple[str, ...]:
        return ("hidden",)

    def mup_problems(self, model: ModelSizes, base: Self, base_model: ModelSizes) -> Iterator[Problem]:
        if self.head(model) != base.head(base_model):
            yield Problem(
                "head_dim",
                "missing",
                "must be set with model.mup, so that the number of heads grows with the width: the scale of shared "
                "attention can't follow growing heads",
            )

    def exported_names(self, model: ModelSizes) -> Names:
        names = super().exported_names(model) | {
            "gate_proj.weight": ("gate_up.weight.gate",),
            "up_proj.weight": ("gate_up.weight.up",),
            "down_proj.weight": ("down.weight",),
        }
        weight_names = {key for keys in names.values() for key in keys}
        return names | {
            name: tuple(weight.stored(name))
            for name, weight in self.parameters(model).items()
            if not weight_names & set(weight.stored(name))
        }

    def query_factor(self, head_dim: int) -> float:
        # With this factor on queries, q k^T is divided by sqrt(head_dim / 2) instead of sqrt(head_dim). head_dim is
        # doubled in this mixer, because the input has twice the model's width.
        return 2**0.5

    @property
    def pairs(self) -> int:
        """Number of low-rank pairs in each sub-layer."""
        return 4 if self.adapt_attention else 1

    def activation_values(self, model: ModelSizes) -> int:
        # a, RMSNorm(a) and the input of `linear`; gate, up, and gelu(gate) * up; the outputs of all A
        block = 3 * model.width + 3 * self.hidden
        return super().activation_values(model) + block + self.pairs * self.rank

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from super().problems(model, max_seq_len)
        if self.norm_after:
            yield Problem("norm_after", "unsupported", "is true, but what this makes enters no stream: leave it out")
        without = {"conv": None, "qk_norm": "none", "scale": None, "beside": False, "output_multiplier": 1.0}
        for option, default in without.items():
            if (value := getattr(self, option)) != default:
                yield Problem(option, "unsupported", f"is {value}, which shared attention does not have: leave it out")


@dataclass(frozen=True)
class SharedAttentionSpec(SharedBlockSpec, AttentionSpec):
    """Options for the shared block with full or windowed attention."""

    kind: ClassVar[str] = "shared_attention"
    module: ClassVar[str] = "hybridtron.mixers.shared_attention:SharedAttention"


@dataclass(frozen=True)
class SharedSpanSpec(SharedBlockSpec, SpanSpec):
    """Options for the shared block with span-expanded attention in training."""

    kind: ClassVar[str] = "shared_span"
    module: ClassVar[str] = "hybridtron.mixers.shared_attention:SharedSpan"
