"""The optimizer: weight decay by weight, fp32 masters, sums of gradients, and refused steps."""

from __future__ import annotations

import pytest
import torch

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import OptimConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from tests.conftest import random_batch, small_config, small_model, small_run


def snapshot(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.weights()}


def set_gradients(engine: Engine, value: float) -> None:
    for shard in engine.optimizer.shards.values():
        shard.weight.main_grad.fill_(value)


def test_weight_decay_applies_to_matrices_alone(alone: Groups) -> None:
    config = small_run(small_config("M-W-", tie_embeddings=False), OptimConfig(weight_decay=0.5))
    engine = Engine(resolve(config)[0], alone)
    before = snapshot(engine)
    set_gradients(engine, 0.0)
    engine.optimizer.step(lr=0.1)
    after = snapshot(engine)
    kept = {name for name in before if torch.equal(after[name], before[name])}
    assert {name.rpartition(".")[2] for name in kept} == {"A_log", "D", "dt_bias", "conv_bias", "weight"}
    assert {name for name in kept if name.endswith(".weight")} == {n for n in before if n.endswith("norm.weight")}
    torch.testing.assert_close(after["embedding.weight"], before["embedding.weight"] * (1 - 0.1 * 0.5))


def test_decay_all_decays_every_weight(alone: Groups) -> None:
    optim = OptimConfig(weight_decay=0.5, decay_all=True)
    engine = Engine(resolve(small_run(small_config("M-W-", tie_embeddings=False), optim))[0], alone)
    before = snapshot(engine)
    set_gradients(engine, 0.0)
    engine.optimizer.step(lr=0.1)
    for name, weight in engine.weights():
        torch.testing.assert_close(weight, before[name] * (1 - 0.1 * 0.5), msg=name)


def test_step_applies_its_weight_decay(alone: Groups) -> None:
    engine = Engine(resolve(small_run(small_config("M-"), OptimConfig(weight_decay=0.5)))[0], alone)
    before = snapshot(engine)["embedding.weight"]
    set_gradients(engine, 0.0)
    engine.step(0.1, weight_decay=0.2)
    torch.testing.assert_close(snapshot(engine)["embedding.weight"], before * (1 - 0.1 * 0.2))


def test_updates_equal_torch_adamw(alone: Groups) -> None:
    """A few steps equal torch's AdamW on a plain copy of the model."""
    eps = 1e-5  # far above the rounding of the smallest gradients, which a smaller one would turn into whole steps
    engine = Engine(resolve(small_run(optim=OptimConfig(weight_decay=0.1, clip=1e9, eps=eps)))[0], alone)
    plain = small_model()
    plain.load_state_dict(dict(engine.weights()))
    groups = [
        {"params": [w for n, w in plain.named_parameters() if plain.table[n].decay is decayed], "weight_decay": decay}
        for decayed, decay in ((True, 0.1), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=eps)
    for _ in range(3):
        batch = random_batch()
        engine.forward_backward([batch])
        engine.optimizer.step(1e-2)
        logits_BLV = plain(batch.tokens_BL, None, batch.seq).output.transpose(0, 1)
        torch.nn.functional.cross_entropy(logits_BLV[batch.mask_BL], batch.labels_BL[batch.mask_BL]).backward()
        adam.step()
        adam.zero_grad()
    for name, weight in engine.weights():
        torch.testing.assert_close(weight, plain.get_parameter(name), rtol=1e-4, atol=1e-5, msg=name)


def test_mamba_recurrence_stays_fp32_under_bf16(alone: Groups) -> None:
    engine = Engine(resolve(small_run(small_config("M-W-"), precision="bf16"))[0], alone)
    kept = {name.rpartition(".")[2] for name, weight in engine.weights() if weight.dtype == torch.float32}
    assert kept == {"A_log", "D", "dt_bias"}
    assert all(shard.weight.main_grad.dtype == torch.float32 for shard in engine.optimizer.shards.values())
    assert all(shard.tensor("master").dtype == torch.float32 for shard in engine.optimizer.shards.values())


def test_small_updates_are_not_lost_under_bf16(alone: Groups) -> None:
    engine = Engine(resolve(small_run(small_config("M-"), OptimConfig(weight_decay=0.0), precision="bf16"))[0], alone)
    master = engine.optimizer.shards["embedding.weight"].tensor("master")
    start = master.detach().clone()
    for _ in range(4):
        set_gradients(engine, 1.0)
        engine.optimizer.step(lr=1e-6)
    torch.testing.assert_close(start - master, torch.full_like(master, 4e-6), rtol=0.05, atol=1e-9)


def test_masters_are_copied_to_the_weights_by_one_call(alone: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(resolve(small_run(small_config("M-W-"), precision="bf16"))[0], alone)
    counts = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: [counts.append(len(to)), copy(to, of)])
    set_gradients(engine, 1.0)
    engine.optimizer.step(lr=0.1)
    shards = engine.optimizer.shards.values()
    assert counts == [len(shards)]
    for shard in shards:
        assert torch.equal(shard.weight.flatten(), shard.tensor("master").to(shard.weight.dtype))


def test_gradients_are_clipped_by_the_norm_over_all_weights(alone: Groups) -> None:
    engine = Engine(resolve(small_run(small_config("W-"), OptimConfig(clip=0.5)))[0], alone)
    set_gradients(engine, 1.0)
    expected = sum(weight.numel() for _, weight in engine.weights()) ** 0.5
    grad_norm, accepted = engine.optimizer.step(lr=1e-3)
    assert accepted
    assert grad_norm == pytest.approx(expected)
    moments = [block.data for block in engine.optimizer.blocks() if block.key.startswith("exp_avg.")]
    clipped = sum(m.square().sum() for m in moments) ** 0.5 / (1 - 0.9)
    assert float(clipped) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_step_with_non_finite_gradients_changes_nothing(alone: Groups, value: float) -> None:
    engine = Engine(resolve(small_run(small_config("M-")))[0], alone)
    engine.forward_backward([random_batch()])
    engine.optimizer.step(1e-3)
    before = snapshot(engine)
    state = [block.data.clone() for block in engine.optimizer.blocks()]
    engine.forward_backward([random_batch()])
    engine.optimizer.shards["norm.weight"].weight.main_grad[0] = value
    _, accepted = engine.optimizer.step(1e-3)
    assert not accepted
    assert all(torch.equal(weight, before[name]) for name, weight in engine.weights())
    assert all(map(torch.equal, (block.data for block in engine.optimizer.blocks()), state))
    assert engine.optimizer.accepted_steps == 1
    assert not any(shard.weight.main_grad.any() for shard in engine.optimizer.shards.values())


def test_norms_name_every_layer(alone: Groups) -> None:
    engine = Engine(resolve(small_run(small_config("M-")))[0], alone)
    engine.forward_backward([random_batch()])
    norms = engine.optimizer.norms()
    layers = {"embedding", "layers.0", "layers.1", "norm"}
    assert set(norms) == {f"{layer}.{kind}" for layer in layers for kind in ("weight_norm", "grad_norm")}
    weights = dict(engine.weights())
    gradients = dict(engine.optimizer.gradients())
    assert norms["embedding.weight_norm"] == pytest.approx(weights["embedding.weight"].norm().item())
    squares = sum(gradients[name].square().sum().item() for name in gradients if name.startswith("layers.1."))
    assert norms["layers.1.grad_norm"] == pytest.approx(squares**0.5)
