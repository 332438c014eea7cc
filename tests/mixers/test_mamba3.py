"""Mamba-3 against its equations token by token, Mamba-2's scan, and itself cut into pieces."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.mamba3 import Mamba3Spec
from hybridtron.mixers.base import build_mixer
from hybridtron.mixers.mamba3 import Mamba3, Trapezoid, Turns, trapezoid
from hybridtron.ops.dispatch import force
from hybridtron.ops.registry import torch_alone
from hybridtron.ops.rotations import AngleInputs, angles
from hybridtron.ops.ssd import SSDInputs, ssd_scan
from hybridtron.parallel.linear import SINGLE_RANK
from tests.conftest import seq_info

SIZES = ModelSizes(width=12, num_sublayers=2)
SPEC = Mamba3Spec(state=8, head_dim=4, groups=2, norm=True)
LENGTH = 70  # two whole blocks of angles and a ragged one
DOCUMENTS = [None, [[70], [70]], [[32, 1, 37], [5, 64, 1]]]
Carried = dict[str, Tensor]


def mixer_of(spec: Mamba3Spec, scale: float = 1.0) -> Mamba3:
    """Build a mixer with all weights random, so that no head, channel or angle is like another."""
    mixer = build_mixer(spec, SIZES, SINGLE_RANK).double()
    assert isinstance(mixer, Mamba3)
    for weight in mixer.parameters():
        weight.data.normal_(0, scale)
    return mixer


def published(mixer: Mamba3, x_LD: Tensor, starts: list[int], before: Carried | None = None) -> tuple[Tensor, Carried]:
    """Compute one row by the published recurrence. States besides h: the angles, the last rotated B, the last x."""
    spec = mixer.spec
    heads = mixer.heads
    outputs = []
    zero = torch.zeros(heads, dtype=torch.float64)
    fresh = {"h": zero[:, None, None], "theta": zero[:, None], "B": zero[:, None], "x": zero[:, None]}
    state = before or fresh
    of_B, of_C = mixer.bc_proj.weight.chunk(2)
    pairs = ((of_B, mixer.B_norm_weight, mixer.B_bias), (of_C, mixer.C_norm_weight, mixer.C_bias))
    for t, u in enumerate(x_LD):
        if t in starts:
            state = fresh
        z, x, dt, a, trap = (mixer.in_proj.weight @ u).split([mixer.inner, mixer.inner, heads, heads, heads])
        delta = F.softplus(dt + mixer.dt_bias)
        trap = torch.sigmoid(trap)
        x = x.view(heads, -1)
        decay = torch.where(a >= 0, 1 + a, 1 / (1 - a.clamp(max=0)))
        alpha = torch.exp(-delta * decay)
        rate = math.pi * torch.tanh(mixer.angle_proj.weight @ u)
        theta = (state["theta"] + delta[:, None] * rate) % (2 * math.pi)
        B, C = (
            turned_by_matrices(normed((projection @ u).view(spec.groups, -1), weight), bias, theta)
            for projection, weight, bias in pairs
        )
        start = ((1 - trap) * delta * alpha)[:, None, None] * state["x"][:, :, None] * state["B"][:, None]
        h = alpha[:, None, None] * state["h"] + start + (trap * delta)[:, None, None] * x[:, :, None] * B[:, None]
        state = {"h": h, "theta": theta, "B": B, "x": x}
        y = (h * C[:, None]).sum(-1) + mixer.D[:, None] * x
        if spec.norm:
            y = normed(y, mixer.norm_weight.view(heads, -1))
        outputs.append(mixer.out_proj.weight @ (y.flatten() * F.silu(z)))
    return torch.stack(outputs), state


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + SPEC.norm_eps).sqrt() * weight


def turned_by_matrices(x_GN: Tensor, bias_H1N: Tensor, theta_HS: Tensor) -> Tensor:
    """Every head's entries by a matrix that turns neighbours."""
    heads, _, size = bias_H1N.shape
    rotated = []
    for head in range(heads):
        turn = torch.eye(size, dtype=x_GN.dtype)
        for s, theta in enumerate(theta_HS[head]):
            cos = theta.cos()
            sin = theta.sin()
            pair = slice(2 * s, 2 * s + 2)
            turn[pair, pair] = torch.stack([cos, -sin, sin, cos]).view(2, 2)
        rotated.append(turn @ (x_GN[head * len(x_GN) // heads] + bias_H1N[head, 0]))
    return torch.stack(rotated)


@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
@pytest.mark.parametrize("spec", [SPEC, Mamba3Spec(state=8, head_dim=4, groups=6, turned=1.0)], ids=["norm", "turned"])
def test_mamba3_equals_the_published_recurrence(spec: Mamba3Spec, lengths: list[list[int]] | None) -> None:
    mixer = mixer_of(spec, 0.5)
    x = torch.randn(LENGTH, 2, SIZES.width, dtype=torch.float64)
    actual = mixer(x, None, seq_info(2, LENGTH, lengths)).y_LBD
    for row in range(2):
        starts = []
        if lengths is not None:
            starts = [sum(lengths[row][:n]) for n in range(1, len(lengths[row]))]
        assert_close(actual[:, row], published(mixer, x[:, row], starts)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cut", [1, 31, 32, 69])
def test_carried_state_equals_the_published_state(cut: int) -> None:
    """Ours has angle 0: the published h and B are turned back by the published angles."""
    mixer = mixer_of(SPEC, 0.5)
    x = torch.randn(LENGTH, 1, SIZES.width, dtype=torch.float64)
    first = mixer(x[:cut], None, seq_info(1, cut))
    _, theirs = published(mixer, x[:cut, 0], [])
    zero_H1N = torch.zeros(mixer.heads, 1, SPEC.state, dtype=torch.float64)
    for name, turned in (("last_B", theirs["B"][:, None]), ("ssm", theirs["h"])):
        back = [turned_by_matrices(turned[:, p], zero_H1N, -theirs["theta"]) for p in range(turned.shape[1])]
        assert_close(first.state[name][0], torch.stack(back, dim=1).view_as(first.state[name][0]))
    assert_close(first.state["last_x"][0], theirs["x"])
    second = mixer(x[cut:], first.state, seq_info(1, LENGTH - cut)).y_LBD
    assert_close(second[:, 0], published(mixer, x[cut:, 0], [], theirs)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bug", ["first_step", "turned"])
def test_planted_faults_between_rows_change_outputs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of the step that the next row begins with; the angle of the state that is handed on."""
    mixer = mixer_of(SPEC, 0.5)
    x = torch.randn(9, 1, SIZES.width, dtype=torch.float64)
    whole = mixer(x, None, seq_info(1, 9)).y_LBD
    lost = {"first_step": lambda *_: None, "turned": lambda state, _: state}
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(f"hybridtron.mixers.mamba3.{bug}", lost[bug])
        second = mixer(x[5:], mixer(x[:5], None, seq_info(1, 5)).state, seq_info(1, 4)).y_LBD
        assert torch.allclose(second, whole[5:]) is not planted


def test_mamba3_without_rotations_and_starts_equals_mamba2_without_convolution() -> None:
    """lambda = 1 and angles 0; a = 0 is A = -1, and biases alone make B and C those of a head."""
    mixer = mixer_of(Mamba3Spec(state=8, head_dim=4))
    x = torch.randn(LENGTH, 1, SIZES.width, dtype=torch.float64)
    z, of_x, dt, a, trap = mixer.in_proj.weight.data.split([mixer.inner, mixer.inner, *3 * [mixer.heads]])
    x[:, :, 0] = 1  # a column of ones, by which a projection is a constant
    trap.zero_()[:, 0] = 1000
    a.zero_()
    for constant in (mixer.angle_proj.weight, mixer.B_bias, mixer.C_bias):
        constant.data.zero_()
    actual = mixer(x, None, seq_info(1, LENGTH)).y_LBD[:, 0]
    B, C = mixer.normed_pair(x)
    x_BLHP, dt_BLH = ((x @ weight.T).transpose(0, 1) for weight in (of_x, dt))
    minus_one_H = -torch.ones(mixer.heads, dtype=torch.float64)
    inputs = SSDInputs(x_BLHP.unflatten(-1, (-1, 4)), dt_BLH, minus_one_H, B, C, mixer.D, mixer.dt_bias)
    y = ssd_scan.reference.function(inputs)[0].flatten(2)[0]
    assert_close(actual, (y * F.silu(x[:, 0] @ z.T)) @ mixer.out_proj.weight.T, rtol=1e-9, atol=1e-9)


def test_output_of_one_token_equals_a_hand_computed_value() -> None:
    """From a zero state, y = (lambda delta C . B + D) x."""
    mixer = mixer_of(Mamba3Spec(state=8, head_dim=4))
    x = torch.randn(1, 1, SIZES.width, dtype=torch.float64)
    expected, _ = published(mixer, x[:, 0], [])
    assert_close(mixer(x, None, seq_info(1, 1)).y_LBD[:, 0], expected)
    z, projected_x, dt, _, trap = (mixer.in_proj.weight @ x[0, 0]).split([mixer.inner, mixer.inner, *3 * [mixer.heads]])
    B, C = (t[0, 0] for t in mixer.normed_pair(x))
    scores = ((B + mixer.B_bias[:, 0]) * (C + mixer.C_bias[:, 0])).sum(-1)
    worth = torch.sigmoid(trap) * F.softplus(dt + mixer.dt_bias) * scores + mixer.D
    y = (worth[:, None] * projected_x.view(mixer.heads, -1)).flatten() * F.silu(z)
    assert_close(expected[0], mixer.out_proj.weight @ y)


def test_decays_of_extreme_projections_have_values_and_gradients() -> None:
    """f is 1 + x and 1 / (1 - x) below 0, where its slope is 1, and has gradients everywhere."""
    a = torch.tensor([-1e4, -1.0, 0.0, 1.0, 50.0], dtype=torch.float64, requires_grad=True)
    step = torch.full((5,), math.log(math.e - 1), dtype=torch.float64)  # whose softplus is 1
    g = trapezoid(step, a, 0 * step).g_BLH
    assert_close(-g, torch.tensor([1 / 10001, 0.5, 1.0, 2.0, 51.0], dtype=torch.float64))
    assert_close(-torch.autograd.grad(g.sum(), a)[0], torch.tensor([1 / 10001**2, 0.25, 1, 1, 1], dtype=torch.float64))


def test_strong_decays_stay_accurate_in_fp32() -> None:
    """Compare fp32 with float64, for steps that forget all every few tokens; their angles are good to some 1e-5."""
    mixer = mixer_of(Mamba3Spec(state=8, head_dim=4), 0.5)
    x = torch.randn(200, 1, SIZES.width, dtype=torch.float64)
    mixer.in_proj.weight.data[2 * mixer.inner : 2 * mixer.inner + mixer.heads, 0] = 1
    x[:, :, 0] = -4
    x[::5, :, 0] = 60
    exact = mixer(x, None, seq_info(1, 200)).y_LBD
    actual = mixer.float()(x.float(), None, seq_info(1, 200)).y_LBD
    assert (actual - exact).norm() <= 2e-5 * exact.norm()


def test_mixer_of_odd_state_runs_by_torch_alone() -> None:
    """The last entry of an odd state has no other to turn with."""
    spec = Mamba3Spec(state=7, head_dim=8)
    mixer = mixer_of(spec, 0.5)
    x = torch.randn(9, 1, SIZES.width, dtype=torch.float64)
    with force(**torch_alone()):
        output_LBD = mixer(x, None, seq_info(1, 9)).y_LBD
        output_LBD.sum().backward()
    assert_close(output_LBD[:, 0], published(mixer, x[:, 0], [])[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["reference", "chunked", "native"])
def test_large_next_steps_cost_bf16_no_digits(form: str) -> None:
    """bf16 keeps its digits at a step of 44. There y could be a difference between numbers hundreds of times larger."""
    torch.manual_seed(0)
    spec = Mamba3Spec(state=32, head_dim=16)
    sizes = ModelSizes(width=32, num_sublayers=2)
    mixer = build_mixer(spec, sizes, SINGLE_RANK)
    assert isinstance(mixer, Mamba3)
    B = torch.randn(1, 4, 1, 32).bfloat16()
    C = torch.randn(1, 4, 1, 32).bfloat16()
    x = torch.randn(1, 4, 4, 16).bfloat16()
    for weight in (mixer.B_bias, mixer.C_bias, mixer.D):
        weight.data.fill_(1)
    step = torch.tensor([0.1, 0.1, 44.0, 0.1]).view(1, 4, 1).expand(1, 4, 4)
    steps = trapezoid(torch.expm1(step.double()).log(), torch.zeros(1, 4, 4), torch.zeros(1, 4, 4))
    turns = Turns(angles(AngleInputs(steps.delta_BLH, torch.ones(1, 4, spec.angles))))

    def read(kind: torch.dtype) -> Tensor:
        wide = torch.promote_types(kind, torch.float32)
        wide_steps = Trapezoid(*(part.to(wide) for part in steps))
        wide_turns = Turns(turns.angles_BLHS.to(wide))
        with force(decay_scan=form):
            y, *_ = mixer.to(wide).scan(x.to(kind), B.to(kind), C.to(kind), wide_steps, wide_turns, {}, seq_info(1, 4))
        return y.double()

    exact = read(torch.float64)[:, 1]
    assert (read(torch.bfloat16)[:, 1] - exact).norm() <= 2**-8 * exact.norm()


def test_wrong_options_are_reported_by_key() -> None:
    assert [problem.key for problem in Mamba3Spec(head_dim=4, groups=4).problems(SIZES, 64)] == ["groups"]
    assert [problem.key for problem in Mamba3Spec(head_dim=5).problems(SIZES, 64)] == ["head_dim"]
    assert [problem.key for problem in Mamba3Spec(head_dim=4, state=3).problems(SIZES, 64)] == ["turned"]
