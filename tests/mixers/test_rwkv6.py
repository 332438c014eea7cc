"""RWKV-6 against loops over tokens that are written from its equations, and against numbers made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.rwkv6 import RWKV6Spec
from hybridtron.architecture.rwkv6_channel_mix import RWKV6ChannelMixSpec
from hybridtron.architecture.table import architecture
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, build_mixer
from hybridtron.mixers.rwkv6 import read_before_step
from hybridtron.model.init import starting_value
from hybridtron.ops.gla import GLAInputs
from hybridtron.parallel.linear import SINGLE_RANK

SIZES = ModelSizes(width=12, num_sublayers=8, layer=2, nth_of_kind=1, layers_of_kind=4)
SPEC = RWKV6Spec(head_dim=4, mix_rank=3, decay_rank=5)
LENGTH = 256


def started(spec: RWKV6Spec | RWKV6ChannelMixSpec, noise: float, dtype: torch.dtype = torch.float64) -> Mixer:
    """Build a mixer with its initial weights plus noise: weights that start at zero would hide others."""
    mixer = build_mixer(spec, SIZES, SINGLE_RANK).to(dtype)
    for name, weight in mixer.named_parameters():
        start = starting_value(spec.parameters(SIZES)[name].init, tuple(weight.shape), 1, name)
        weight.data.copy_(start + noise * torch.randn(start.shape, dtype=torch.float64))
    return mixer


def time_mix(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Token by token, each stream for itself."""
    heads, size = weights["bonus"].shape
    before = torch.zeros_like(tokens[0])
    state = torch.zeros(heads, size, size).to(tokens)
    outputs = []
    for x in tokens:
        change = before - x
        stream = {}
        inner = torch.tanh(weights["mix_down.weight"] @ (x + change * weights["mix_input"]))
        for index, name in enumerate("rwkvg"):
            part = slice(index * SPEC.mix_rank, (index + 1) * SPEC.mix_rank)
            stream[name] = x + change * (weights["mix"][index] + weights["mix_up"][:, part] @ inner[part])
        r, k, v, z = (weights[f"{name}_proj.weight"] @ stream[name] for name in "rkvg")
        w = weights["decay_bias"] + weights["decay_up.weight"] @ torch.tanh(weights["decay_down.weight"] @ stream["w"])
        step = k.view(heads, size, 1) * v.view(heads, 1, size)
        read = (r.view(heads, size, 1) * (state + weights["bonus"].unsqueeze(2) * step)).sum(1)
        state = torch.exp(-torch.exp(w)).view(heads, size, 1) * state + step
        read = (read - read.mean(1, keepdim=True)) / (read.var(1, correction=0, keepdim=True) + 64e-5).sqrt()
        y = read.flatten() * weights["norm_weight"] + weights["norm_bias"]
        outputs.append(weights["out_proj.weight"] @ (y * z * torch.sigmoid(z)))
        before = x
    return torch.stack(outputs)


def gradients(mixer: Mixer, x: Tensor, y: Tensor) -> list[Tensor]:
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y).to(y)).sum()
    return list(torch.autograd.grad(loss, [x, *mixer.parameters()]))


@pytest.mark.parametrize("log_decay", [None, -8.0], ids=["as_started", "strong"])
def test_time_mix_equals_its_equations(log_decay: float | None) -> None:
    """Use the official decays, and tokens that each leave e^-8 of the state; fp32 agrees less exactly."""
    mixer = started(SPEC, noise=0.1)
    if log_decay is not None:
        mixer.get_parameter("decay_bias").data.fill_(math.log(-log_decay))
    x = torch.randn(LENGTH, 1, SIZES.width, dtype=torch.float64, requires_grad=True)
    seq = SeqInfo.stream(1, LENGTH)
    expected = time_mix(dict(mixer.named_parameters()), x[:, 0])
    actual = mixer(x, None, seq).y_LBD[:, 0]
    assert_close(actual, expected, rtol=1e-9, atol=1e-10)
    for ours, theirs in zip(gradients(mixer, x, actual), gradients(mixer, x, expected), strict=True):
        assert_close(ours, theirs, rtol=1e-7, atol=1e-7 * float(theirs.abs().max()))
    single = mixer.float()(x.float(), None, seq).y_LBD[:, 0]
    assert (single - expected).norm() < 1e-4 * expected.norm()


def test_rwkv6_without_decay_and_with_a_bonus_of_one_equals_linear_attention() -> None:
    q, k, v = torch.randn(3, 2, 150, 3, 4, dtype=torch.float64)
    y, state = read_before_step(GLAInputs(q, k, v, torch.zeros_like(k)), torch.ones(3, 4).double())
    scores = torch.einsum("bihn,bjhn->bhij", q, k).tril()
    assert_close(y, torch.einsum("bhij,bjhp->bihp", scores, v))
    assert_close(state, torch.einsum("blhn,blhp->bhnp", k, v))


def test_first_token_of_a_document_reads_its_values_alone() -> None:
    """This holds at a document's start too, however many tokens came before it."""
    q, k, v, g = torch.randn(4, 1, 5, 2, 3, dtype=torch.float64)
    bonus = torch.randn(2, 3, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 1, 1, 2]])
    y, state = read_before_step(GLAInputs(q, k, v, -g.abs(), None, documents), bonus)
    for token in (0, 2, 4):
        score = (q[0, token] * bonus * k[0, token]).sum(-1, keepdim=True)
        assert_close(y[0, token], score * v[0, token])
    assert_close(state[0], k[0, 4].unsqueeze(2) * v[0, 4].unsqueeze(1))


def test_channel_mix_equals_its_equations() -> None:
    mixer = started(RWKV6ChannelMixSpec(hidden=20), noise=0.3)
    w = dict(mixer.named_parameters())
    x = torch.randn(30, 1, SIZES.width, dtype=torch.float64)
    actual = mixer(x, None, SeqInfo.stream(1, 30)).y_LBD[:, 0]
    before = torch.zeros(SIZES.width, dtype=torch.float64)
    for token, ours in zip(x[:, 0], actual, strict=True):
        k = w["key.weight"] @ (token * (1 - w["key_mix"]) + before * w["key_mix"])
        r = w["receptance.weight"] @ (token * (1 - w["receptance_mix"]) + before * w["receptance_mix"])
        assert_close(ours, torch.sigmoid(r) * (w["value.weight"] @ k.clamp(min=0).square()))
        before = token


def test_initial_weights_equal_those_of_the_official_code() -> None:
    """Compare the third of six blocks (width 128, l = 2, n = 6) among other layers with numbers worked out by hand."""
    layers = {"R": {"kind": "rwkv6"}, "C": {"kind": "rwkv6_channel_mix"}, "M": {"kind": "mamba"}}
    model = ModelConfig(128, 96, "M(RC)*6", layers, tie_embeddings=False)
    table = architecture(model).table

    def start(name: str) -> Tensor:
        return starting_value(table[name].init, table[name].shape, 0, name)

    # i / d = 1/4
    third = "layers.5.mixer."
    i = 32
    slow = 1 - 0.25 ** (4 / 6)
    fast = 1 - 0.25 ** (2 / 6)
    assert start(third + "mix_input")[i].item() == pytest.approx(slow)
    assert start(third + "mix")[:, i].tolist() == pytest.approx([fast, slow, slow, slow - 0.3 * 0.4, fast])
    decay = start(third + "decay_bias")
    assert decay[[0, -1]].tolist() == pytest.approx([-6.0, -1.0])
    assert decay[i].item() == pytest.approx(-6 + 5 * (32 / 127) ** (0.7 + 1.3 * 0.4))
    bonus = start(third + "bonus").flatten()
    by_hand = [0.4 * (1 - n / 127) + zigzag for n, zigzag in ((0, 0.0), (1, 0.1), (2, -0.1), (3, 0.0), (64, 0.1))]
    assert bonus[[0, 1, 2, 3, 64]].tolist() == pytest.approx(by_hand)
    assert start(third + "norm_weight").unique().tolist() == pytest.approx([0.5**0.7])
    for name, length in (("r_proj", 1.0), ("k_proj", 0.1), ("v_proj", 1.0), ("g_proj", 0.1), ("out_proj", 0.0)):
        weight = start(f"{third}{name}.weight")
        assert_close(weight @ weight.T, length**2 * torch.eye(128), rtol=0, atol=1e-5)
    channel = "layers.6.mixer."
    assert table[channel + "key.weight"].shape == (448, 128)
    key = start(channel + "key.weight")
    assert_close(key.T @ key, torch.eye(128), rtol=0, atol=1e-5)
    assert start(channel + "key_mix")[i].item() == start(channel + "receptance_mix")[i].item() == pytest.approx(slow)
    assert not start(channel + "value.weight").any()
    assert not start(channel + "receptance.weight").any()


def test_only_layer_starts_as_a_first_layer() -> None:
    start = starting_value(RWKV6Spec().parameters(ModelSizes(64, 1))["decay_bias"].init, (64,), 0, "w")
    assert_close(start, -6 + 5 * (torch.arange(64) / 63) ** 0.7)


def test_last_tokens_are_convolution_states() -> None:
    assert {name: part.kind for name, part in SPEC.state_parts(SIZES).items()} == {"ssm": "ssm", "shift": "conv"}
    assert {part.kind for part in RWKV6ChannelMixSpec().state_parts(SIZES).values()} == {"conv"}


def test_ranks_that_would_cut_heads_are_refused() -> None:
    assert [problem.key for problem in SPEC.layout_problems(SIZES, 2)] == ["head_dim"]
    assert not list(SPEC.layout_problems(SIZES, 3))
    assert [problem.key for problem in RWKV6Spec(head_dim=5).problems(SIZES, 64)] == ["head_dim"]
