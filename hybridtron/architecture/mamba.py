"""Mamba-1 (S6): a selective state space after a causal convolution. Gu and Dao 2023; Samba, section 2.1.

    x, z = in_proj(u);  x = silu(conv(x));  dt, B, C = x_proj(x);  dt = softplus(dt_proj(dt) + dt_bias)
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t;  y_t = C_t h_t + D x_t                              A = -exp(A_log)
    out_proj(y * silu(z))

u is the mixer's input, and z is the output gate. Each inner channel has its own recurrence, with its own h, x, dt (the
step size), A and D. B and C are common to all channels. h, A, B and C are vectors with `state` entries.

With `inner_norm`, dt (before dt_proj), B and C each pass an RMSNorm. The norms have weights (`learned`), as in Jamba,
or none (`plain`), as in Falcon-Mamba.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from hybridtron.architecture.base import Cut, ModelSizes, Names, Parameter, StatePart, linear, output_linear
from hybridtron.architecture.inits import Constant, InverseSoftplus, LogRange, Uniform
from hybridtron.architecture.sparse import BranchSizes, RecurrenceSpec
from hybridtron.limits import above, at_least, disordered, one_of
from hybridtron.problems import Problem


@dataclass(frozen=True)
class MambaSpec(RecurrenceSpec):
    """Options of a Mamba-1 mixer, with optional sparse attention (`sparse.py`)."""

    kind: ClassVar[str] = "mamba"
    module: ClassVar[str] = "hybridtron.mixers.mamba:Mamba"
    width_option: ClassVar[str] = "expand"
    projects_by_default: ClassVar[bool] = True
    copied: ClassVar[tuple[str, ...]] = ("x_proj.weight.B", "x_proj.weight.C")
    projects_input: ClassVar[bool] = True
    supports_mup: ClassVar[bool] = True

    state: Annotated[int, at_least(1)] = 16  # state entries per inner channel
    expand: Annotated[int, at_least(1)] = 2  # inner channels, in multiples of the model's width
    conv: Annotated[int, at_least(2)] = 4  # taps of the causal convolution
    # inner size of the low-rank projection to dt; null: width / 16, rounded up
    dt_rank: Annotated[int | None, at_least(1, "leave it out for width / 16")] = None
    dt_min: float = 0.001  # smallest initial step size
    dt_max: float = 0.1  # largest initial step size
    # RMSNorms of dt (before its projection), B and C. learned: with weights, as in Jamba; plain: without
    inner_norm: Annotated[str, one_of(("none", "learned", "plain"))] = "none"
    norm_eps: Annotated[float, above(0)] = 1e-5  # added to the mean square in these norms

    def inner(self, model: ModelSizes) -> int:
        return self.expand * model.width

    def rank(self, model: ModelSizes) -> int:
        return self.dt_rank or math.ceil(model.width / 16)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width = model.width
        inner = self.inner(model)
        rank = self.rank(model)
        state = self.state
        return {
            "in_proj.weight": linear(2 * inner, width, parts=(("x", inner), ("z", inner))),
            "conv_weight": Parameter((inner, self.conv), Uniform(self.conv**-0.5), cuts=(Cut(0),)),
            "conv_bias": Parameter((inner,), Uniform(self.conv**-0.5), decay=False, cuts=(Cut(0),)),
            "x_proj.weight": linear(
                rank + 2 * state, inner, parts=(("dt", rank), ("B", state), ("C", state)), cut=Cut(1), fp8=False
            ),
            "dt_proj.weight": linear(inner, rank, fp8=False),
            "dt_bias": Parameter(
                (inner,), InverseSoftplus(self.dt_min, self.dt_max), decay=False, fp32=True, cuts=(Cut(0),)
            ),
            "A_log": Parameter((inner, state), LogRange(), decay=False, fp32=True, cuts=(Cut(0),)),
            "D": Parameter((inner,), Constant(1.0), decay=False, fp32=True, cuts=(Cut(0),)),
            "out_proj.weight": output_linear(width, inner, model.num_sublayers),
            **self.norm_parameters(model),
            **self.branch_parameters(model),
        }

    def norm_parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        """Return the weights of the inner norms.

        Each rank norms dt, B and C in full, but uses the results only for its own channels.
        """
        if self.inner_norm != "learned":
            return {}
        sizes = {"dt_norm.weight": self.rank(model), "B_norm.weight": self.state, "C_norm.weight": self.state}
        start = Constant(1.0)
        return {name: Parameter((size,), start, decay=False, partial_gradient=True) for name, size in sizes.items()}

    def shared_sizes(self, model: ModelSizes) -> BranchSizes:
        return BranchSizes(self.state, self.inner(model), groups=1, heads=self.inner(model))

    def exported_names(self, model: ModelSizes) -> Names:
        """Return the weights' names in the authors' implementation and in transformers.

        The inner norms have the names of Jamba.
        """
        names = super().exported_names(model)
        moved = {"conv1d.weight": "conv_weight", "conv1d.bias": "conv_bias", "dt_proj.bias": "dt_bias"}
        if self.inner_norm == "learned":
            moved |= {f"{part.lower()}_layernorm.weight": f"{part}_norm.weight" for part in ("dt", "B", "C")}
        return names | {theirs: names.pop(ours) for theirs, ours in moved.items()}

    def exported_options(self, model: ModelSizes) -> dict[str, Any]:
        return super().exported_options(model) | {"dt_rank": self.rank(model)}

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        # operations for each state entry: exp(dt A): 1; dt B x: 2; the recurrence: 2; times C, and the sum: 2
        return super().flops(model, seq_len) | {"scan": 7 * self.inner(model) * self.state}

    def activation_values(self, model: ModelSizes) -> int:
        # x, z, the convolved x, dt, the gated output; dt before dt_proj, B and C; the fp32 state at every 128th token
        states = model.wide * self.inner(model) * self.state // 128
        gated = 0 if self.sparse is None else 2 * self.inner(model)  # the sparse attention's output and its gate
        read = self.rank(model) + 2 * self.state
        normed = 0 if self.inner_norm == "none" else read  # dt, B and C before their norms
        return 5 * self.inner(model) + read + normed + states + gated + self.branch_values(model)

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        inner = self.inner(model)
        return super().state_parts(model) | {
            "ssm": StatePart("ssm", (inner, self.state), "float32", cuts=(Cut(0),), transition=inner * self.state),
            "conv": StatePart("conv", (self.conv - 1, inner), cuts=(Cut(1),)),
        }

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from super().problems(model, max_seq_len)
        yield from disordered(self, "dt_min", "dt_max")

    def mup_problems(self, model: ModelSizes, base: Self, base_model: ModelSizes) -> Iterator[Problem]:
        yield from super().mup_problems(model, base, base_model)
        if self.inner_norm != "none":
            what = f"is {self.inner_norm}, for which no rule of muP was checked: use inner_norm=none, or leave out mup"
            yield Problem("inner_norm", "unsupported", what)
