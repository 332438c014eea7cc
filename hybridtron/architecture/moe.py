"""Mixture of experts: a router chooses a few experts for each token, and a shared expert computes every token.

    z = W u                                     the router's logits, in fp32
    s = softmax(z) or sigmoid(z)
    c = s + correction                          the correction exists with `balance: bias`
    groups: keep only the `group_limit` groups with the largest sums of their two best c
    i = the `top_k` experts with the largest c
    w = s_i;  normalise: w / sum(w);  times `scale`
    y = sum_k w_k expert_{i_k}(u) + sigmoid(v u) shared(u)

u is the input. Experts and shared expert are gated MLPs, down(silu(gate(u)) * up(u)), or down(relu(up(u))^2), without
biases. The factor sigmoid(v u) exists with `shared_gate`. With `latent`, routed experts read a projection of u to
`latent` channels, and their sum is projected back to the model's width, as in Nemotron 3 Super.

No choice is dropped without `capacity`. With it, an expert computes in training at most C of a row's choices, those of
the earliest tokens; other choices are dropped: their w_k is 0, and the token's other weights stay as they are.

    C = ceil(capacity * L * top_k / experts)    L: tokens of the row in a forward pass

Training keeps the experts' loads even by one of two rules. A load is the number of choices that fall on an expert:

    auxiliary   a loss for each row (a sequence in the batch): coefficient * E * sum_e f_e p_e, where f_e is the
                fraction of the row's choices that fall on expert e, and p_e the mean of the row's s_e / sum(s)
    bias        after each accepted step, the correction of each expert moves by `speed`: up if the expert's load in
                the step was below the mean load, down if it was above (Wang et al., 2024). Its gradient is not used

`z_loss` adds z_loss * mean(logsumexp(z)^2) for each row, as in ST-MoE (Zoph et al., 2022). The losses of a row
are weighted by its number of loss tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Self

from hybridtron.architecture.base import EXPERTS, Cut, MixerSpec, ModelSizes, Names, Parameter, linear, output_linear
from hybridtron.architecture.inits import Constant, EachExpert, OutputProjection, Projection
from hybridtron.limits import above, at_least, one_of
from hybridtron.problems import Problem

ACTIVATIONS = ("swiglu", "squared_relu")
SCORES = ("softmax", "sigmoid")
BALANCES = ("auxiliary", "bias", "none")


@dataclass(frozen=True)
class MoESpec(MixerSpec):
    """Options of a mixture of experts."""

    kind: ClassVar[str] = "moe"
    module: ClassVar[str] = "hybridtron.mixers.moe:MoE"
    supports_context_parallel: ClassVar[bool] = True
    supports_mup: ClassVar[bool] = True
    width_option: ClassVar[str] = "hidden"

    # number of experts; must be set
    experts: Annotated[int, at_least(2, "8 to 128 is usual")] = 0
    # experts that compute each token; must be set
    top_k: Annotated[int, at_least(1, "2 to 8 is usual")] = 0
    # inner channels of an expert; must be set
    hidden: Annotated[int, at_least(1, "8/3 of model.width, divided by top_k, is usual")] = 0
    activation: Annotated[str, one_of(ACTIVATIONS)] = "swiglu"  # MLP of an expert, and of the shared expert
    shared: Annotated[int, at_least(0)] = 0  # inner channels of an expert that computes every token; 0: none
    # width of the routed experts' inputs and outputs, if it is not the model's: they are projected
    latent: Annotated[int | None, at_least(1, "a quarter of model.width is usual")] = None
    shared_gate: bool = False  # multiply the shared expert's output by a sigmoid of the input, as in Qwen3-Next
    scores: Annotated[str, one_of(SCORES)] = "softmax"  # function from the router's logits to scores
    normalise: bool = True  # divide a token's weights by their sum
    scale: Annotated[float, above(0)] = 1.0  # factor of the weights
    groups: Annotated[int, at_least(1)] = 1  # groups of consecutive experts; 1: none
    group_limit: Annotated[int | None, at_least(1)] = None  # groups from which a token may choose; set with groups
    # rule that keeps loads even. auxiliary: a loss; bias: a correction of the scores, which each step moves
    balance: Annotated[str, one_of(BALANCES)] = "auxiliary"
    coefficient: Annotated[float, at_least(0)] = 0.01  # factor of the loss, for balance: auxiliary
    speed: Annotated[float, at_least(0)] = 0.001  # change of the correction in a step, for balance: bias
    z_loss: Annotated[float, at_least(0)] = 0.0  # factor of the loss on the router's logits
    # in training, the largest part of a row that an expert computes, as a multiple of the mean; further choices are
    # dropped. null: no choice is dropped
    capacity: Annotated[float | None, above(0, "1.25 to 2 is usual")] = None

    @property
    def growing_sizes(self) -> tuple[str, ...]:
        if self.shared:
            return ("hidden", "shared")
        return ("hidden",)

    @property
    def corrected(self) -> bool:
        """True if the choice of experts depends on a correction."""
        return self.balance == "bias"

    @property
    def auxiliary(self) -> tuple[str, ...]:
        balance = ("balance",) if self.balance == "auxiliary" else ()
        logits = ("router_z",) if self.z_loss else ()
        return balance + logits

    @property
    def matrices(self) -> int:
        """Number of matrices that an expert applies to its input: gate and up, or up alone."""
        return 2 if self.activation == "swiglu" else 1

    def most_of_row(self, tokens: int) -> int:
        """Return the largest number of a row's choices that an expert computes in training, with a capacity.

        tokens: tokens of the row on all ranks. The number is exact, so it does not depend on how ranks divide the row.
        """
        assert self.capacity is not None
        return math.ceil(Fraction(str(self.capacity)) * tokens * self.top_k / self.experts)

    def slots_per_token(self, tokens: int) -> Fraction:
        """Return the rows that ranks exchange per token in slots: as many as an expert may compute, for each expert.

        tokens: tokens of a row
        """
        return Fraction(self.experts * self.most_of_row(tokens), tokens)

    def outer(self, model: ModelSizes) -> int:
        """Return the width of the routed experts' inputs and outputs."""
        return self.latent or model.width

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width = model.width
        outer = self.outer(model)
        deep = model.num_sublayers
        active = Fraction(self.top_k, self.experts)
        inner = self.matrices * self.hidden
        parts = (("gate", self.hidden), ("up", self.hidden)) if self.activation == "swiglu" else ()
        output = Projection(self.hidden**-0.5) if self.latent else OutputProjection((self.hidden * deep) ** -0.5)
        # Each rank has the router, and some inner channels of its experts. An output is weighted before tensor-parallel
        # ranks sum it, so a rank computes the part of the router's gradient that comes from its channels.
        table = {
            "router": Parameter(
                (self.experts, width), Projection(width**-0.5), fp32=True, partial_gradient=True, scoring=True
            ),
            "gate_up": Parameter(
                (self.experts, inner, outer),
                EachExpert(Projection(outer**-0.5)),
                parts=parts,
                parts_axis=1,
                cuts=(Cut(0, "expert"), Cut(1, "expert_tensor")),
                family=EXPERTS,
                active=active,
                stacked=True,
            ),
            "down": Parameter(
                (self.experts, outer, self.hidden),
                EachExpert(output),
                cuts=(Cut(0, "expert"), Cut(2, "expert_tensor")),
                family=EXPERTS,
                active=active,
                stacked=True,
            ),
        }
        if self.latent:
            back = OutputProjection((outer * deep) ** -0.5)
            table["latent_in"] = Parameter((outer, width), Projection(width**-0.5), partial_gradient=True)
            table["latent_out"] = Parameter((width, outer), back, partial_gradient=True)
        if self.corrected:
            zero = Constant(0.0)
            table["correction"] = Parameter((self.experts,), zero, decay=False, fp32=True, trained=False, grown=zero)
        if self.shared:
            both = (("gate", self.shared), ("up", self.shared)) if self.activation == "swiglu" else ()
            table["shared_gate_up.weight"] = linear(self.matrices * self.shared, width, parts=both, fp8=False)
            table["shared_down.weight"] = output_linear(width, self.shared, deep, fp8=False)
        if self.shared_gate:
            table["shared_gate"] = Parameter((1, width), Projection(width**-0.5), partial_gradient=True, scoring=True)
        return table

    def exported_names(self, model: ModelSizes) -> Names:
        names: Names = {"gate.weight": ("router",)}
        if self.activation == "swiglu":
            names |= {"experts.gate_proj": ("gate_up.gate",), "experts.up_proj": ("gate_up.up",)}
        else:
            names["experts.up_proj"] = ("gate_up",)
        names["experts.down_proj"] = ("down",)
        if self.latent:
            names |= {"fc1_latent_proj.weight": ("latent_in",), "fc2_latent_proj.weight": ("latent_out",)}
        if self.corrected:
            names["gate.e_score_correction_bias"] = ("correction",)
        if self.shared and self.activation == "swiglu":
            names["shared_expert.gate_proj.weight"] = ("shared_gate_up.weight.gate",)
            names["shared_expert.up_proj.weight"] = ("shared_gate_up.weight.up",)
        elif self.shared:
            names["shared_expert.up_proj.weight"] = ("shared_gate_up.weight",)
        if self.shared:
            names["shared_expert.down_proj.weight"] = ("shared_down.weight",)
        if self.shared_gate:
            names["shared_expert_gate.weight"] = ("shared_gate",)
        return names

    def activation_values(self, model: ModelSizes) -> int:
        inner = (self.matrices + 1) * self.hidden
        # Every tensor-parallel rank saves the router's input, and the input and output of each of a token's experts.
        # With `latent`, it also saves the projected input, and the experts' sum before it is projected back.
        copies = 2 * self.top_k * self.outer(model) + 2 * (self.latent or 0)
        router = model.wide * (model.width + 3 * self.experts)
        return self.top_k * inner + (self.matrices + 1) * self.shared + model.tensor * (copies + router)

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        if self.top_k > self.experts:
            yield Problem("top_k", "out-of-range", f"is {self.top_k}, must be at most experts, {self.experts}")
        if self.top_k == 1 and self.normalise:
            what = "is true with top_k=1: weights would always be 1, so the router would not learn"
            yield Problem("normalise", "no-effect", f"{what}: use normalise=false")
        if self.latent is not None and self.latent >= model.width:
            what = f"is {self.latent}, must be below model.width, {model.width}"
            yield Problem("latent", "out-of-range", f"{what}: or leave it out, for experts of the model's width")
        if self.experts % self.groups:
            what = f"is {self.groups}, which does not divide {self.experts} experts"
            yield Problem("groups", "not-divisible", f"{what}: use a divisor of experts, or 1")
        else:
            yield from self._group_problems()
        if self.capacity is not None and self.capacity * self.top_k >= self.experts:
            what = f"is {self.capacity}, with which an expert may compute all tokens"
            yield Problem("capacity", "no-effect", f"{what}: use less than {self.experts / self.top_k:g}, or null")
        if self.shared_gate and not self.shared:
            yield Problem("shared_gate", "no-effect", "is true without a shared expert: set shared, or leave it out")
        if self.balance != "auxiliary" and self.coefficient != MoESpec.coefficient:
            what = f"is {self.coefficient}, but balance is {self.balance}"
            yield Problem("coefficient", "no-effect", f"{what}: leave it out, or use balance=auxiliary")
        if self.balance != "bias" and self.speed != MoESpec.speed:
            what = f"is {self.speed}, but balance is {self.balance}"
            yield Problem("speed", "no-effect", f"{what}: leave it out, or use balance=bias")

    def _group_problems(self) -> Iterator[Problem]:
        limit = self.group_limit
        if limit is None and self.groups == 1:
            return
        if limit is None:
            what = f"is {self.groups}, but a token may choose from all groups"
            yield Problem("groups", "no-effect", f"{what}: set a group_limit below {self.groups}, or leave groups out")
            return
        if limit > self.groups:
            yield Problem("group_limit", "out-of-range", f"is {limit}, must be at most groups, {self.groups}")
            return
        if limit == self.groups:
            what = f"is {limit}, the number of groups, so a token may choose from all experts"
            yield Problem("group_limit", "no-effect", f"{what}: use less than groups, or leave both out")
            return
        left = limit * (self.experts // self.groups)
        if left < self.top_k:
            what = f"is {limit}, which leaves {left} experts, fewer than top_k={self.top_k}"
            yield Problem("group_limit", "does-not-fit", f"{what}: use a larger group_limit, or fewer groups")

    def mup_problems(self, model: ModelSizes, base: Self, base_model: ModelSizes) -> Iterator[Problem]:
        yield from super().mup_problems(model, base, base_model)
        if self.latent:
            what = f"is {self.latent}, for which no rule of muP was checked: leave latent or model.mup out"
            yield Problem("latent", "unsupported", what)

    def layout_problems(self, model: ModelSizes, tensor: int) -> Iterator[Problem]:
        for option in ("hidden", "shared"):
            channels = getattr(self, option)
            if channels % tensor:
                what = f"is {channels}, which {tensor} ranks can't share evenly"
                yield Problem(option, "not-divisible", what)
