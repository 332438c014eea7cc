"""Mamba-2 (SSD): a state space with one decay for each head, after a causal convolution. Dao and Gu 2024.

    z, x, dt = in_proj(u);  B, C = bc_proj(u);  x, B, C = silu(conv(x, B, C));  delta = softplus(dt + dt_bias)
    h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t^T;  y_t = h_t C_t + D x_t             A = -exp(A_log), one per head
    out_proj(norm(y * silu(z)))                             RMSNorm over each group's channels, one weight per channel

u is the mixer's input, z is the output gate, delta is the step size, and h is a head's state. conv is a causal
convolution along the tokens, separate for each channel. `dt_floor` is a lower bound on delta. Without `norm` the output
is out_proj(y * silu(z)). With `multipliers` the projected z, x, B, C and dt are scaled (dt before its bias), as in
Falcon-H1. The heads are divided into groups, and a group's heads share B and C: head h belongs to group
h // (heads / groups).

B and C have a projection of their own here. The reason is tensor parallelism: ranks divide the heads, but each rank
holds all groups if the groups can't be divided evenly. In published checkpoints, both projections are fused into one
in_proj, and both convolutions into one conv1d. `exported_names` lists our weights that form each of them, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, ClassVar

from hybridtron.architecture.base import Cut, ModelSizes, Names, Parameter, StatePart, linear, output_linear
from hybridtron.architecture.inits import Constant, InverseSoftplus, LogUniform, Uniform
from hybridtron.architecture.sparse import BranchSizes, RecurrenceSpec
from hybridtron.limits import above, at_least, disordered, divisors_near
from hybridtron.problems import Problem, choice

CHUNK = 128
"""Tokens per chunk in the recurrence's chunked algorithm; the FLOP count assumes this algorithm."""


@dataclass(frozen=True)
class ProjectionMultipliers:
    """Factors that multiply the outputs of in_proj and bc_proj."""

    z: Annotated[float, above(0)] = 1.0  # factor of the gate, before SiLU
    x: Annotated[float, above(0)] = 1.0  # factor of x (the values), before the convolution
    B: Annotated[float, above(0)] = 1.0  # factor of B (the keys), before the convolution
    C: Annotated[float, above(0)] = 1.0  # factor of C (the queries), before the convolution
    dt: Annotated[float, above(0)] = 1.0  # factor of the step size, before its bias and softplus

    def __str__(self) -> str:
        chosen = {name: value for name, value in asdict(self).items() if value != 1}
        return "{" + ", ".join(f"{name}: {value}" for name, value in chosen.items()) + "}"


@dataclass(frozen=True)
class Mamba2Spec(RecurrenceSpec):
    """Options of a Mamba-2 mixer, with optional sparse attention (`sparse.py`).

    FLOPs are counted for the chunked algorithm. Its kernels compute full CHUNK x CHUNK tiles, including the part above
    the diagonal that the causal mask discards.
    """

    kind: ClassVar[str] = "mamba2"
    module: ClassVar[str] = "hybridtron.mixers.mamba2:Mamba2"
    width_option: ClassVar[str] = "head_dim"
    projects_by_default: ClassVar[bool] = False
    projects_input: ClassVar[bool] = True
    supports_mup: ClassVar[bool] = True

    state: Annotated[int, at_least(1)] = 128  # state entries per inner channel
    head_dim: Annotated[int, at_least(1)] = 64  # channels of a head
    expand: Annotated[int, at_least(1)] = 2  # inner channels, in multiples of the model's width; unused with `heads`
    # number of heads, which overrides `expand`; null: expand * width / head_dim
    heads: Annotated[int | None, at_least(1)] = None
    groups: Annotated[int, at_least(1)] = 1  # number of head groups; the heads of a group share B and C
    conv: Annotated[int, at_least(2)] = 4  # taps of the causal convolution
    dt_min: float = 0.001  # smallest initial step size
    dt_max: float = 0.1  # largest initial step size
    dt_floor: Annotated[float, at_least(0)] = 0.0  # lower bound of every step size; 0: none
    a_min: float = 1.0  # smallest initial -A
    a_max: float = 16.0  # largest initial -A
    norm: bool = True  # norm the gated output
    norm_eps: Annotated[float, above(0)] = 1e-5  # added to the mean square in the norm of the gated output
    # factors of the input projection's parts: {z, x, B, C, dt}
    multipliers: ProjectionMultipliers = ProjectionMultipliers()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.multipliers, Mapping):  # from YAML or config.json
            object.__setattr__(self, "multipliers", ProjectionMultipliers(**self.multipliers))

    @property
    def growing_heads(self) -> tuple[str, ...]:
        if self.heads is None:
            return ()  # the number follows from `expand`
        return ("heads",)

    def inner(self, model: ModelSizes) -> int:
        if self.heads is None:
            return self.expand * model.width
        return self.heads * self.head_dim

    def num_heads(self, model: ModelSizes) -> int:
        return self.inner(model) // self.head_dim

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width = model.width
        inner = self.inner(model)
        heads = self.num_heads(model)
        bc_size = self.groups * self.state
        bc = bc_projection(self.groups, self.state, width)
        taps = Uniform(self.conv**-0.5)
        bc_taps = replace(bc, shape=(2 * bc_size, self.conv), init=taps, fp8=False, projection=False, heads=())
        per_head = Parameter((heads,), Constant(1.0), decay=False, fp32=True, cuts=(Cut(0),))
        fused = (("z", inner), ("x", inner), ("dt", heads))
        return {
            "in_proj.weight": linear(2 * inner + heads, width, parts=fused, heads=(heads, heads, 1)),
            "bc_proj.weight": bc,
            "x_conv_weight": Parameter((inner, self.conv), taps, cuts=(Cut(0),)),
            "x_conv_bias": Parameter((inner,), taps, decay=False, cuts=(Cut(0),)),
            "bc_conv_weight": bc_taps,
            "bc_conv_bias": replace(bc_taps, shape=(2 * bc_size,), decay=False),
            "dt_bias": replace(per_head, init=InverseSoftplus(self.dt_min, self.dt_max)),
            "A_log": replace(per_head, init=LogUniform(self.a_min, self.a_max)),
            "D": per_head,
            **({"norm_weight": replace(per_head, shape=(inner,), fp32=False)} if self.norm else {}),
            "out_proj.weight": output_linear(width, inner, model.num_sublayers),
            **self.branch_parameters(model),
        }

    def shared_sizes(self, model: ModelSizes) -> BranchSizes:
        return BranchSizes(self.state, self.inner(model), self.groups, self.num_heads(model))

    def exported_names(self, model: ModelSizes) -> Names:
        return {
            "in_proj.weight": (
                *("in_proj.weight.z", "in_proj.weight.x"),
                *("bc_proj.weight.B", "bc_proj.weight.C", "in_proj.weight.dt"),
            ),
            "conv1d.weight": ("x_conv_weight", "bc_conv_weight.B", "bc_conv_weight.C"),
            "conv1d.bias": ("x_conv_bias", "bc_conv_bias.B", "bc_conv_bias.C"),
            "dt_bias": ("dt_bias",),
            "A_log": ("A_log",),
            "D": ("D",),
            **({"norm.weight": ("norm_weight",)} if self.norm else {}),
            "out_proj.weight": ("out_proj.weight",),
            **{name: tuple(weight.stored(name)) for name, weight in self.branch_parameters(model).items()},
        }

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        inner = self.inner(model)
        chunk = min(CHUNK, seq_len)
        # inside a chunk: C B^T for each group, and the matmul of C B^T with x; between chunks: B x^T, added to the
        # state, and C times the state
        ssd = 2 * chunk * (self.groups * self.state + inner) + 4 * self.state * inner
        return super().flops(model, seq_len) | {"ssd": ssd}

    def activation_values(self, model: ModelSizes) -> int:
        # z, x, the convolved x, y and the gated y; B and C before and after the convolution; dt twice (in the output of
        # in_proj and separately). Without a norm, the gating op reads in addition a factor of 1 per head, in fp32.
        head_values = (2 if self.norm else 4) * self.num_heads(model)
        # each rank holds all groups if they can't be divided evenly
        copies = model.tensor if self.groups % model.tensor else 1
        mixer_values = 5 * self.inner(model) + 4 * copies * self.groups * self.state + head_values
        return mixer_values + self.branch_values(model)

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        heads = self.num_heads(model)
        bc_size = self.groups * self.state
        return super().state_parts(model) | {
            "ssm": StatePart(
                "ssm", (heads, self.head_dim, self.state), "float32", heads, cuts=(Cut(0),), transition=heads
            ),
            "x_conv": StatePart("conv", (self.conv - 1, self.inner(model)), cuts=(Cut(1),)),
            "bc_conv": StatePart(
                "conv",
                (self.conv - 1, 2 * bc_size),
                parts=(bc_size, bc_size),
                cuts=(Cut(1, unit=self.state, replicate=True),),
            ),
        }

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from super().problems(model, max_seq_len)
        if self.heads is None:
            yield from uneven_heads(model.width, self.expand, self.head_dim, self.groups)
        else:
            yield from uneven_groups(self.heads, self.groups)
        yield from disordered(self, "dt_min", "dt_max")
        yield from disordered(self, "a_min", "a_max")


def bc_projection(groups: int, state: int, width: int) -> Parameter:
    """Return the weight of the projection to B and C.

    If tensor-parallel ranks can't divide the groups evenly, every rank computes B and C for all groups, but uses them
    for its own heads only. The weight's gradient on a rank is then partial.
    """
    size = groups * state
    weight = linear(2 * size, width, parts=(("B", size), ("C", size)), heads=(groups, groups))
    return replace(weight, cuts=(Cut(0, unit=state, replicate=True),), partial_gradient=True)


def uneven_heads(width: int, expand: int, head_dim: int, groups: int) -> Iterator[Problem]:
    """Yield a problem if `head_dim` does not divide the inner channels, or if `groups` does not divide the heads."""
    inner = expand * width
    heads = inner // head_dim
    if inner % head_dim:
        channels = f"the {inner} inner channels (expand={expand} times model.width={width})"
        yield Problem(
            "head_dim",
            "not-divisible",
            f"is {head_dim}, must divide {channels}: {choice(divisors_near(inner, head_dim))}",
        )
    else:
        yield from uneven_groups(heads, groups)


def uneven_groups(heads: int, groups: int) -> Iterator[Problem]:
    """Yield a problem if `groups` does not divide the heads."""
    if heads % groups:
        fitting = choice(divisors_near(heads, groups))
        yield Problem("groups", "not-divisible", f"is {groups}, must divide the {heads} heads: {fitting}")
