"""Gated DeltaNet and KDA: their equations token by token, identities, how they start, and transformers' layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.testing import assert_close
from transformers import KimiLinearConfig, OlmoHybridConfig, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.delta_rule import DeltaRuleSpec
from hybridtron.architecture.gated_deltanet import GatedDeltaNetSpec
from hybridtron.architecture.kda import KDASpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, build_mixer
from hybridtron.mixers.delta_rule import of_length
from hybridtron.mixers.linear_attention import HeadInputs
from hybridtron.model.init import starting_value
from hybridtron.parallel.linear import SINGLE_RANK

SIZES = ModelSizes(width=32, num_sublayers=2)
LENGTH = 70
GROUPED = GatedDeltaNetSpec(heads=4, key_heads=2, expand_k=0.5, expand_v=1.0, negative_eigenvalues=True)


def built(spec: DeltaRuleSpec) -> Mixer:
    """Build a mixer in fp64 with large weights, so that decays, steps and gates differ widely."""
    mixer = build_mixer(spec, SIZES, SINGLE_RANK).double()
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return mixer


def convolved(x_LC: Tensor, taps_CW: Tensor) -> Tensor:
    padded = F.pad(x_LC, (0, 0, taps_CW.shape[1] - 1, 0))
    return F.silu(sum(padded[w : w + len(x_LC)] * taps_CW[:, w] for w in range(taps_CW.shape[1])))


def unit(x_LN: Tensor) -> Tensor:
    return x_LN / (x_LN.square().sum(1, keepdim=True) + 1e-6).sqrt()


def one_head(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Compute one head by the matrix exp(g) (I - beta k k^T), with which each token multiplies the state."""
    state = torch.zeros(k.shape[1], v.shape[1], dtype=v.dtype)
    read = []
    for t in range(len(v)):
        step = torch.eye(k.shape[1], dtype=v.dtype) - beta[t] * torch.outer(k[t], k[t])
        state = step @ (decay[t].reshape(-1, 1) * state) + beta[t] * torch.outer(k[t], v[t])
        read.append(q[t] @ state / k.shape[1] ** 0.5)
    return torch.stack(read)


def test_gated_deltanet_equals_its_equations() -> None:
    mixer = built(GROUPED)
    x = torch.randn(LENGTH, SIZES.width, dtype=torch.float64)
    qkv, z = (x @ mixer.in_proj.weight.T).split((64, 32), dim=-1)
    q, k, v = convolved(qkv, mixer.conv_weight).split((16, 16, 32), dim=-1)
    a, b = (x @ mixer.ab_proj.weight.T).split((4, 4), dim=-1)
    outputs = []
    for head in range(4):
        keys = slice(8 * (head // 2), 8 * (head // 2) + 8)
        values = slice(8 * head, 8 * head + 8)
        unit_q, unit_k = (
            part[:, keys] / (part[:, keys].square().sum(1, keepdim=True) + 1e-6).sqrt() for part in (q, k)
        )
        decay = (1 + (a[:, head] + mixer.dt_bias[head]).exp()) ** -mixer.A_log[head].exp()
        read = one_head(unit_q, unit_k, v[:, values], 2 / (1 + (-b[:, head]).exp()), decay)
        outputs.append(read / (read.square().mean(1, keepdim=True) + 1e-5).sqrt() * mixer.norm_weight)
    expected = (torch.cat(outputs, dim=1) * z * torch.sigmoid(z)) @ mixer.out_proj.weight.T
    assert_close(mixer(x.unsqueeze(1), None, SeqInfo.stream(1, LENGTH)).y_LBD[:, 0], expected, rtol=1e-9, atol=1e-9)


def test_kda_equals_its_equations() -> None:
    mixer = built(KDASpec(heads=4, expand_k=0.75))
    x = torch.randn(LENGTH, SIZES.width, dtype=torch.float64)
    q, k, v = convolved(x @ mixer.in_proj.weight.T, mixer.conv_weight).split((24, 24, 32), dim=-1)
    a = x @ mixer.decay_down.weight.T @ mixer.decay_up.weight.T + mixer.dt_bias
    b = x @ mixer.b_proj.weight.T
    z = x @ mixer.gate_down.weight.T @ mixer.gate_up.weight.T
    outputs = []
    for head in range(4):
        keys = slice(6 * head, 6 * head + 6)
        values = slice(8 * head, 8 * head + 8)
        unit_q = unit(q[:, keys])
        unit_k = unit(k[:, keys])
        decay = (1 + a[:, keys].exp()) ** -mixer.A_log[head].exp()
        read = one_head(unit_q, unit_k, v[:, values], torch.sigmoid(b[:, head]), decay)
        outputs.append(read / (read.square().mean(1, keepdim=True) + 1e-5).sqrt() * mixer.norm_weight)
    expected = (torch.cat(outputs, dim=1) * torch.sigmoid(z)) @ mixer.out_proj.weight.T
    assert_close(mixer(x.unsqueeze(1), None, SeqInfo.stream(1, LENGTH)).y_LBD[:, 0], expected, rtol=1e-9, atol=1e-9)


def test_kda_with_equal_decays_of_channels_equals_gated_deltanet() -> None:
    """Compare outputs before the gates, from the same queries, keys, values and state."""
    scalar = built(GatedDeltaNetSpec(heads=4, expand_k=1.0, expand_v=1.0))
    wide = built(KDASpec(heads=4))
    up_HR = torch.randn(4, 8, dtype=torch.float64)
    with torch.no_grad():
        wide.decay_up.weight.copy_(up_HR.repeat_interleave(8, dim=0))
        wide.dt_bias.copy_(scalar.dt_bias.repeat_interleave(8))
        wide.A_log.copy_(scalar.A_log)
        scalar.ab_proj.weight.copy_(torch.cat([up_HR @ wide.decay_down.weight, wide.b_proj.weight]))
    q, k, v = torch.randn(3, 2, LENGTH, 4, 8, dtype=torch.float64)
    x = torch.randn(LENGTH, 2, 32, dtype=torch.float64)
    state = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    documents_BL = torch.arange(2 * LENGTH).view(2, LENGTH) // 50
    seq = SeqInfo(torch.arange(LENGTH).expand(2, -1), documents_BL)
    by_channel = HeadInputs((x, wide.decay_down(x), wide.b_proj(x)), q, k, v, state, seq)
    by_head = by_channel._replace(others=(scalar.ab_proj(x),))
    for ours, theirs in zip(wide.attend(by_channel), scalar.attend(by_head), strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_gated_deltanet_without_steps_only_decays() -> None:
    mixer = built(GROUPED)
    x = torch.randn(LENGTH, 1, SIZES.width, dtype=torch.float64)
    mixer.reach = 0.0
    seq = SeqInfo.stream(1, LENGTH)
    assert not mixer(x, None, seq).y_LBD.any()
    before = {"ssm": torch.randn(1, 4, 8, 8, dtype=torch.float64)}
    a_LH = x[:, 0] @ mixer.ab_proj.weight[:4].T + mixer.dt_bias
    left_H = (-mixer.A_log.exp() * (1 + a_LH.exp()).log()).sum(0).exp()
    assert_close(mixer(x, before, seq).state["ssm"], before["ssm"] * left_H.view(1, 4, 1, 1))


def test_normalized_keys_are_no_longer_than_one() -> None:
    """No step may enlarge a state, also in bf16, where only the rounding of entries remains."""
    x = 3 * torch.randn(1, 400, 6, 96)
    lengths = torch.stack(
        [of_length(x.to(dtype), 1.0).double().norm(dim=-1) for dtype in (torch.float32, torch.bfloat16)]
    )
    assert_close(lengths[0], torch.ones_like(lengths[0]), rtol=1e-6, atol=0)
    assert (lengths[1] - 1).abs().max() < 2e-3
    assert abs(lengths[1].mean() - 1) < 1e-4
    assert_close(of_length(x, 0.25), 0.25 * F.normalize(x, dim=-1))


def test_initial_decays_span_the_published_range() -> None:
    """Steps log-uniform on [0.001, 0.1], A uniform on [1, 16]: the first decays are between e^-1.6 and e^-0.001."""
    table = GatedDeltaNetSpec(heads=4096).parameters(ModelSizes(4096, 2))
    start = {name: starting_value(table[name].init, (4096,), 1, name).double() for name in ("A_log", "dt_bias")}
    size = start["A_log"].exp()
    step = F.softplus(start["dt_bias"])
    assert_close(torch.stack([size.min(), size.max()]), torch.tensor([1.0, 16.0]).double(), rtol=0.01, atol=0)
    assert_close(torch.stack([step.min(), step.max()]), torch.tensor([0.001, 0.1]).double(), rtol=0.01, atol=0)
    assert_close(torch.stack([size.mean(), step.log().mean()]), torch.tensor([8.5, -4.6]).double(), rtol=0.02, atol=0)
    for name in ("A_log", "dt_bias"):
        assert (table[name].fp32, table[name].decay) == (True, False)


@pytest.mark.parametrize(
    ("options", "tensor", "keys"),
    [
        ({"heads": 3}, 2, ["heads"]),
        ({"heads": 8, "key_heads": 2}, 4, ["key_heads"]),
        ({"heads": 8, "key_heads": 4}, 4, []),
    ],
)
def test_tensor_parallel_ranks_need_whole_groups_of_heads(
    options: dict[str, Any], tensor: int, keys: list[str]
) -> None:
    problems = GatedDeltaNetSpec(**options).layout_problems(ModelSizes(96, 2), tensor)
    assert [problem.key for problem in problems] == keys


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"heads": 8, "key_heads": 3}, "key_heads"),
        ({"heads": 10, "key_heads": 5}, "key_heads"),
        ({"heads": 5}, "heads"),
        ({"dt_min": 0.2}, "dt_min"),
    ],
)
def test_wrong_options_are_reported_by_key(options: dict[str, Any], key: str) -> None:
    problems = GatedDeltaNetSpec(**options).problems(ModelSizes(96, 2), 4096)
    assert {problem.key for problem in problems} == {key}


def by_parts(mixer: Mixer, name: str, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return mixer.get_parameter(name).split(sizes)


def olmo_hybrid() -> tuple[Mixer, torch.nn.Module, Callable[[Mixer], dict[str, Tensor]]]:
    config = OlmoHybridConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=8, pad_token_id=0,
        linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=12,
        linear_allow_neg_eigval=True,
    )  # fmt: skip

    def theirs(ours: Mixer) -> dict[str, Tensor]:
        q, k, v, z = by_parts(ours, "in_proj.weight", (24, 24, 48, 48))
        a, b = by_parts(ours, "ab_proj.weight", (4, 4))
        projections = {"q": q, "k": k, "v": v, "g": z, "a": a, "b": b, "o": ours.out_proj.weight}
        return {f"{name}_proj.weight": weight for name, weight in projections.items()} | shared(ours, "o_norm")

    return built(GatedDeltaNetSpec(heads=4, negative_eigenvalues=True)), OlmoHybridGatedDeltaNet(config, 0), theirs


def qwen3_next() -> tuple[Mixer, torch.nn.Module, Callable[[Mixer], dict[str, Tensor]]]:
    """Return transformers' layer with two value heads a key head; its projections' rows are ordered by key heads."""
    config = Qwen3NextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=4, vocab_size=8, rms_norm_eps=1e-5,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip

    def theirs(ours: Mixer) -> dict[str, Tensor]:
        def by_key_head(*parts: Tensor) -> Tensor:
            return torch.cat([part.unflatten(0, (2, -1)) for part in parts], dim=1).flatten(0, 1)

        a, b = by_parts(ours, "ab_proj.weight", (4, 4))
        return shared(ours, "norm") | {
            "in_proj_qkvz.weight": by_key_head(*by_parts(ours, "in_proj.weight", (16, 16, 32, 32))),
            "in_proj_ba.weight": by_key_head(b, a),
            "out_proj.weight": ours.out_proj.weight,
        }

    spec = GatedDeltaNetSpec(heads=4, key_heads=2, expand_k=0.5, expand_v=1.0)
    return built(spec), Qwen3NextGatedDeltaNet(config, 0), theirs


def kimi_linear() -> tuple[Mixer, torch.nn.Module, Callable[[Mixer], dict[str, Tensor]]]:
    config = KimiLinearConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=8, pad_token_id=0, rms_norm_eps=1e-5,
        linear_head_dim=8, linear_num_heads=4,
    )  # fmt: skip

    def theirs(ours: Mixer) -> dict[str, Tensor]:
        projections = dict(zip("qkv", by_parts(ours, "in_proj.weight", (32, 32, 32)), strict=True))
        projections |= {"b": ours.b_proj.weight, "o": ours.out_proj.weight}
        projections |= {"g_a": ours.gate_down.weight, "g_b": ours.gate_up.weight}
        decays = {"A_log": ours.A_log.view(1, 1, 4, 1), "dt_bias": ours.dt_bias}
        decays |= {"f_a_proj.weight": ours.decay_down.weight, "f_b_proj.weight": ours.decay_up.weight}
        return {
            **{f"{name}_proj.weight": weight for name, weight in projections.items()},
            **{f"forget_gate.{name}": weight for name, weight in decays.items()},
            "o_norm.weight": ours.norm_weight,
            "conv1d.weight": ours.conv_weight.unsqueeze(1),
        }

    return built(KDASpec(heads=4)), KimiLinearDeltaAttention(config, 0), theirs


def shared(ours: Mixer, norm: str) -> dict[str, Tensor]:
    names = {"dt_bias": ours.dt_bias, "A_log": ours.A_log, f"{norm}.weight": ours.norm_weight}
    return {**names, "conv1d.weight": ours.conv_weight.unsqueeze(1)}


@pytest.mark.parametrize("pair", [olmo_hybrid, qwen3_next, kimi_linear])
def test_mixer_equals_the_layer_of_transformers(pair: Callable) -> None:
    """The recurrence of transformers computes in fp32 even here, so fp32's rounding is the limit."""
    ours, layer, weights_of = pair()
    x = torch.randn(2, LENGTH, SIZES.width, dtype=torch.float64, requires_grad=True)
    loss_weight = torch.randn_like(x)
    expected = functional_call(layer.double(), weights_of(ours), (x,), strict=True)
    actual = ours(x.transpose(0, 1), None, SeqInfo.stream(2, LENGTH)).y_LBD.transpose(0, 1)
    assert_close(actual, expected.double(), rtol=1e-4, atol=1e-4)
    inputs = {"x": x, **dict(ours.named_parameters())}
    ours, theirs = (torch.autograd.grad((y * loss_weight).sum(), list(inputs.values())) for y in (actual, expected))
    for name, our_gradient, their_gradient in zip(inputs, ours, theirs, strict=True):
        assert (our_gradient - their_gradient).norm() <= 1e-4 * their_gradient.norm(), name
