"""Mamba-3 (SISO): Mamba-2 with trapezoidal steps and a complex state, without convolution. Lahoti et al. 2026.

    z, x, dt, a, trap = in_proj(u);  B, C = bc_proj(u);  rate = pi tanh(angle_proj(u))
    delta = softplus(dt + dt_bias);  A = -f(a);  lambda = sigmoid(trap);  theta_t = theta_{t-1} + delta_t rate_t
    B, C = rotated by theta(norm(B) + B_bias, norm(C) + C_bias)
    h_t = exp(delta_t A_t) (h_{t-1} + (1 - lambda_t) delta_t x_{t-1} B_{t-1}^T) + lambda_t delta_t x_t B_t^T
    y_t = h_t C_t + D x_t;   out_proj(y * silu(z)), and with `norm` out_proj(norm(y) * silu(z))

The state's input is a weighted mean of both ends of a step, and pairs of its entries are rotated, each by its own
angle per head. B and C belong to a group, their biases to a head; the norms of B, C and y are over a head's entries.
Only differences of angles matter. A carried state is therefore rotated back to angle 0, together with x and B of the
last token, so that it can also start another text. The published class carries the angles as well.

Two forms are published. Here f(x) = 1 + x, and 1 / (1 - x) below 0, as in the main branch of state-spaces/mamba since
June 2026; release 2.3.2 has softplus. The authors changed it because a 2B hybrid diverged with softplus under a
constant-and-decay schedule, as A fell to zero, and saw no loss under a cosine. The weights have the same names and
shapes in both forms, and in flash-linear-attention's `mamba3`, but they are not interchangeable: that class has
softplus. The published floor of 1e-4 under f begins where a is below -9999, and is left out. MIMO is not implemented.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from hybridtron.architecture.base import Cut, MixerSpec, ModelSizes, Names, Parameter, StatePart, linear, output_linear
from hybridtron.architecture.inits import Constant, InverseSoftplus
from hybridtron.architecture.mamba2 import CHUNK, bc_projection, uneven_heads
from hybridtron.limits import above, at_least, at_most, disordered
from hybridtron.problems import Problem


@dataclass(frozen=True)
class Mamba3Spec(MixerSpec):
    """Options of a Mamba-3 mixer. `state` is the size n, `head_dim` the channels of a head."""

    kind: ClassVar[str] = "mamba3"
    module: ClassVar[str] = "hybridtron.mixers.mamba3:Mamba3"
    hands_over: ClassVar[bool] = True
    width_option: ClassVar[str] = "head_dim"

    state: Annotated[int, at_least(2)] = 128  # state size n per channel
    head_dim: Annotated[int, at_least(1)] = 64  # channels of a head
    expand: Annotated[int, at_least(1)] = 2  # inner channels, in multiples of the model's width
    groups: Annotated[int, at_least(1)] = 1  # head groups that share B and C, except for the heads' biases
    turned: Annotated[float, above(0), at_most(1)] = 0.5  # fraction of the state that is rotated; published: 0.5 and 1
    norm: bool = False  # norm each head's output before the gate
    dt_min: float = 0.001  # smallest initial step size
    dt_max: float = 0.1  # largest initial step size
    norm_eps: Annotated[float, above(0)] = 1e-5  # added to the mean square in the norms

    def inner(self, model: ModelSizes) -> int:
        return self.expand * model.width

    def num_heads(self, model: ModelSizes) -> int:
        return self.inner(model) // self.head_dim

    @property
    def angles(self) -> int:
        """Number of rotated entry pairs in the state."""
        return int(self.state * self.turned) // 2

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width = model.width
        inner = self.inner(model)
        heads = self.num_heads(model)
        bc = bc_projection(self.groups, self.state, width)
        # every rank replicates all angles, and uses them for its own heads
        angles = replace(linear(self.angles, width, fp8=False), cuts=(), partial_gradient=True)
        fused = (("z", inner), ("x", inner), ("dt", heads), ("A", heads), ("trap", heads))
        per_head = Parameter((heads,), Constant(1.0), decay=False, fp32=True, cuts=(Cut(0),))
        bias = replace(per_head, shape=(heads, 1, self.state))  # the middle axis is the rank of the MIMO form
        norm = Parameter((self.state,), Constant(1.0), decay=False, partial_gradient=True)
        table = {
            "in_proj.weight": linear(2 * inner + 3 * heads, width, parts=fused),
            "bc_proj.weight": bc,
            "angle_proj.weight": angles,
            "dt_bias": replace(per_head, init=InverseSoftplus(self.dt_min, self.dt_max)),
            "B_bias": bias,
            "C_bias": bias,
            "B_norm_weight": norm,
            "C_norm_weight": norm,
            "D": per_head,
            "out_proj.weight": output_linear(width, inner, model.num_sublayers),
        }
        if self.norm:
            table["norm_weight"] = Parameter((inner,), Constant(1.0), decay=False, cuts=(Cut(0),))
        return table

    def exported_names(self, model: ModelSizes) -> Names:
        names: Names = {name: (name,) for name in ("dt_bias", "B_bias", "C_bias", "D", "out_proj.weight")}
        names["in_proj.weight"] = (
            *("in_proj.weight.z", "in_proj.weight.x", "bc_proj.weight.B", "bc_proj.weight.C"),
            *("in_proj.weight.dt", "in_proj.weight.A", "in_proj.weight.trap", "angle_proj.weight"),
        )
        if self.norm:
            norms = ("B_norm", "C_norm", "norm")
        else:
            norms = ("B_norm", "C_norm")
        return names | {f"{norm}.weight": (f"{norm}_weight",) for norm in norms}

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        inner = self.inner(model)
        heads = self.num_heads(model)
        chunk = min(CHUNK, seq_len)
        # as Mamba-2, with C B^T per head; rotating a pair of B and one of C takes 6 each
        ssd = 2 * chunk * (heads * self.state + inner) + 4 * self.state * inner
        return super().flops(model, seq_len) | {"ssd": ssd, "turns": 12 * heads * self.angles}

    def activation_values(self, model: ModelSizes) -> int:
        # z, x, x in rows, y, the gate and its product with y; y normed, and by the norm's weight; B and C as
        # projected, in rows, normed, and by head; in fp32 angles, some 12 numbers a head, the rates twice
        inner = self.inner(model)
        heads = self.num_heads(model)
        by_head = 2 * heads * self.state + model.wide * heads * (self.angles + 12)
        groups = 6 * self.groups * self.state
        return (8 if self.norm else 6) * inner + groups + by_head + 2 * model.wide * self.angles

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        heads = self.num_heads(model)
        cuts = (Cut(0),)
        shape = (heads, self.head_dim, self.state)
        transition = heads * (1 + 2 * self.angles)
        return {
            "ssm": StatePart("ssm", shape, "float32", heads, cuts=cuts, transition=transition),
            "last_B": StatePart("conv", (heads, self.state), cuts=cuts),
            "last_x": StatePart("conv", (heads, self.head_dim), cuts=cuts),
        }

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from uneven_heads(model.width, self.expand, self.head_dim, self.groups)
        if not self.angles:
            yield Problem(
                "turned",
                "not-divisible",
                f"is {self.turned}, which rotates no pair of the state's {self.state} entries: use more",
            )
        yield from disordered(self, "dt_min", "dt_max")
