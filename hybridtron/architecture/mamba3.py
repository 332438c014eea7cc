"""Mamba-3 (SISO): Mamba-2 with trapezoidal steps and a complex state, without convolution. Lahoti et al. 2026.

    z, x, dt, a, trap = in_proj(u);  B, C = bc_proj(u);  rate = pi tanh(angle_proj(u))
    delta = softplus(dt + dt_bias);  A = -f(a);  lambda = sigmoid(trap);  theta_t = theta_{t-1} + delta_t rate_t
    B, C = rotate(norm(B) + B_bias, theta), rotate(norm(C) + C_bias, theta)
    h_t = exp(delta_t A_t) (h_{t-1} + (1 - lambda_t) delta_t x_{t-1} B_{t-1}^T) + lambda_t delta_t x_t B_t^T
    y_t = h_t C_t + D x_t;   out_proj(y * silu(z)), and with `norm` out_proj(norm(y) * silu(z))

u is the mixer's input, z is the output gate, delta is the step size, and h is a head's state. Step t goes from the
previous token to token t. By the trapezoidal rule, it adds to the state a weighted mean of x B^T at these two tokens,
times delta_t. The previous token has the weight 1 - lambda_t, and token t has the weight lambda_t. B and C are rotated
in pairs of entries; each head has its own angle theta for every pair. All heads in a group share B and C, but each head
adds its own biases. The norms of B and C are over a group's state entries. The norm of y is over a head's channels.

The outputs depend only on differences between angles. The state that is carried from row to row (sequence to sequence)
is therefore rotated back to angle 0, and the last token's B is carried without rotation. So another text can also start
from this state and this B. The authors' class keeps its state rotated, and carries the angles in addition.

Two versions of f are published:

    used here    1 + a for a >= 0 and 1 / (1 - a) for a < 0, as in state-spaces/mamba's main branch since June 2026
    softplus     softplus(a), as in release 2.3.2 of state-spaces/mamba and in flash-linear-attention's `mamba3`

The authors replaced softplus, because it let A fall to zero, and a 2B hybrid then diverged under a constant-and-decay
schedule. The weights have equal names and shapes in both versions, but a model trained with one version can't run with
the other. The authors' lower bound 1e-4 on f is left out, because it has an effect only if a is below -9999. The MIMO
variant is not implemented.
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
    """Options for a Mamba-3 mixer."""

    kind: ClassVar[str] = "mamba3"
    module: ClassVar[str] = "hybridtron.mixers.mamba3:Mamba3"
    supports_context_parallel: ClassVar[bool] = True
    width_option: ClassVar[str] = "head_dim"

    state: Annotated[int, at_least(2)] = 128  # state entries per inner channel
    head_dim: Annotated[int, at_least(1)] = 64  # channels of a head
    expand: Annotated[int, at_least(1)] = 2  # inner channels, in multiples of the model's width
    # number of head groups; the heads of a group share B and C, except for the biases
    groups: Annotated[int, at_least(1)] = 1
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
        """Number of pairs of state entries that are rotated."""
        return int(self.state * self.turned) // 2

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width = model.width
        inner = self.inner(model)
        heads = self.num_heads(model)
        bc = bc_projection(self.groups, self.state, width)
        # every rank computes the rates of all angles, and uses them for its own heads
        angles = replace(linear(self.angles, width, fp8=False), cuts=(), partial_gradient=True)
        fused = (("z", inner), ("x", inner), ("dt", heads), ("A", heads), ("trap", heads))
        per_head = Parameter((heads,), Constant(1.0), decay=False, fp32=True, cuts=(Cut(0),))
        bias = replace(per_head, shape=(heads, 1, self.state))  # the middle axis is the MIMO variant's rank, 1 here
        norm = Parameter((self.state,), Constant(1.0), decay=False, partial_gradient=True)
        table = {
            "in_proj.weight": linear(2 * inner + 3 * heads, width, parts=fused, heads=(heads, heads, 1, 1, 1)),
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
        # inside a chunk: C B^T for each head, and the matmul of C B^T with x; between chunks: B x^T, added to the
        # state, and C times the state; rotating a pair of entries takes 6 operations for B, and 6 for C
        ssd = 2 * chunk * (heads * self.state + inner) + 4 * self.state * inner
        return super().flops(model, seq_len) | {"ssd": ssd, "turns": 12 * heads * self.angles}

    def activation_values(self, model: ModelSizes) -> int:
        # inner channels: z, x, a contiguous copy of x, y, the gated y; without `norm` also silu(z), which the kernel
        # with a norm computes again
        # groups: B and C as projected, copied and normed
        # heads: B and C rotated; in fp32 the angles and about 12 elements
        # rates: twice, in fp32
        inner = self.inner(model)
        heads = self.num_heads(model)
        by_head = 2 * heads * self.state + model.wide * heads * (self.angles + 12)
        groups = 6 * self.groups * self.state
        return (5 if self.norm else 6) * inner + groups + by_head + 2 * model.wide * self.angles

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
