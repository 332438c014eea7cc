"""The optimizer: which weights are decayed, what stays in fp32, how gradients add up, and when a step is refused."""

from __future__ import annotations

import pytest
import torch

from hybridtron.config.schema import OptimConfig
from hybridtron.engine.optim import Optimizer
from hybridtron.engine.schedule import forward_backward
from hybridtron.model.lm import LanguageModel
from tests.conftest import random_batch, small_model

CPU = torch.device("cpu")


def snapshot(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_decays_matrices_and_nothing_else() -> None:
    model = small_model("M-W-", tie_embeddings=False)
    optimizer = Optimizer(model, OptimConfig(weight_decay=0.5))
    for master in optimizer.masters.values():
        master.grad = torch.zeros_like(master)
    before = snapshot(model)
    optimizer.step(lr=0.1)
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    kept = set(before) - moved
    assert {name.rpartition(".")[2] for name in kept} == {"A_log", "D", "dt_bias", "conv_bias", "weight"}
    assert {name for name in kept if name.endswith(".weight")} == {n for n in before if n.endswith("norm.weight")}
    torch.testing.assert_close(model.embedding.weight, before["embedding.weight"] * (1 - 0.1 * 0.5))


def test_mamba_recurrence_stays_fp32_under_bf16() -> None:
    model = small_model("M-W-").cast(torch.bfloat16)
    kept = {name.rpartition(".")[2] for name, weight in model.named_parameters() if weight.dtype == torch.float32}
    assert kept == {"A_log", "D", "dt_bias"}
    assert all(master.dtype == torch.float32 for master in Optimizer(model, OptimConfig()).masters.values())


def test_bf16_gradients_add_up_in_fp32() -> None:
    model = small_model("M-").cast(torch.bfloat16)
    optimizer = Optimizer(model, OptimConfig())
    weight, master = model.embedding.weight, optimizer.masters["embedding.weight"]
    for _ in range(300):  # in bf16 the sum would stop growing at 256
        weight.sum().backward()
    assert weight.grad is None
    assert master.grad is not None
    assert torch.equal(master.grad, torch.full_like(master, 300.0))


def test_small_updates_are_not_lost_under_bf16() -> None:
    model = small_model("M-").cast(torch.bfloat16)
    optimizer = Optimizer(model, OptimConfig(weight_decay=0.0))
    master = optimizer.masters["embedding.weight"]
    start = master.detach().clone()
    for _ in range(4):
        master.grad = torch.ones_like(master)
        optimizer.step(lr=1e-6)
    torch.testing.assert_close(start - master, torch.full_like(master, 4e-6), rtol=0.05, atol=1e-9)


def test_clips_by_the_norm_over_all_weights() -> None:
    model = small_model("W-")
    optimizer = Optimizer(model, OptimConfig(clip=0.5))
    for master in optimizer.masters.values():
        master.grad = torch.ones_like(master)
    expected = sum(weight.numel() for weight in model.parameters()) ** 0.5
    grad_norm, accepted = optimizer.step(lr=1e-3)
    assert accepted
    assert grad_norm == pytest.approx(expected)
    moments = optimizer.state()["exp_avg"]
    clipped = sum(m.square().sum() for m in moments.values()) ** 0.5 / (1 - 0.9)
    assert float(clipped) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_with_non_finite_gradients_changes_nothing(value: float) -> None:
    model = small_model("M-")
    optimizer = Optimizer(model, OptimConfig())
    forward_backward(model, [random_batch()], 0.0, CPU)
    optimizer.step(1e-3)
    before, moments = snapshot(model), {k: v.clone() for k, v in optimizer.state()["exp_avg"].items()}
    forward_backward(model, [random_batch()], 0.0, CPU)
    gradient = optimizer.masters["norm.weight"].grad
    assert gradient is not None
    gradient[0] = value
    _, accepted = optimizer.step(1e-3)
    assert not accepted
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert all(torch.equal(m, moments[name]) for name, m in optimizer.state()["exp_avg"].items())
    assert optimizer.accepted_steps == 1
    assert all(master.grad is None for master in optimizer.masters.values())


def test_norms_name_every_layer() -> None:
    model = small_model("M-")
    optimizer = Optimizer(model, OptimConfig())
    forward_backward(model, [random_batch()], 0.0, CPU)
    norms = optimizer.norms()
    layers = {"embedding", "layers.0", "layers.1", "norm"}
    assert set(norms) == {f"{layer}.{kind}" for layer in layers for kind in ("weight_norm", "grad_norm")}
    assert norms["embedding.weight_norm"] == pytest.approx(model.embedding.weight.norm().item())
