"""Loads and corrections of routers: counted once a token, moved once an accepted step, by exact signs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.adapters import AdaptersConfig, Adapting
from hybridtron.architecture.model import ModelConfig
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, ParallelConfig, PhaseConfig, Recompute, StateMode, StatesConfig
from hybridtron.data.batch import Batch
from hybridtron.engine.engine import Engine
from hybridtron.engine.routers import ChoiceValues, move_corrections
from hybridtron.mixers.base import Routed
from hybridtron.mixers.moe import MoE, shares
from hybridtron.parallel.groups import Groups
from hybridtron.proving.audit.cases import small_model
from tests.conftest import random_batch, small_run

ROWS = 2
LENGTH = 12
LANES = 4
CORRECTION = "layers.3.mixer.correction"
TOP_K = {1: 2, 3: 3}
SPEED = 0.05


def config_of(recompute: str = "none", chunks: int = 1) -> Config:
    model: ModelConfig = small_model("MeMx", tied=True, heads={})
    phase = PhaseConfig(tokens="1M", seq_len=LENGTH, global_batch=LANES * chunks, micro_batch=ROWS, lr=1e-3)
    states = StatesConfig(mode=StateMode.tbtt, chunks=chunks, through_time=True) if chunks > 1 else StatesConfig()
    return dataclasses.replace(
        small_run(model),
        states=states,
        phases=[phase],
        parallel=ParallelConfig(recompute=Recompute(recompute), distributed_optimizer=False),
    )


def engine_of(config: Config, alone: Groups) -> Engine:
    engine = Engine(resolve(config)[0], alone)
    engine.start_phase(engine.phase, range(LANES))
    return engine


def unevenly_masked(micro_batch: int) -> list[Batch]:
    """Return the same four rows in every division; they have 2 or 12 loss tokens, in turn."""
    torch.manual_seed(3)
    batch = random_batch(rows=LANES, length=LENGTH)
    learned = torch.tensor([2, 12, 2, 12])
    mask_BL = torch.arange(LENGTH) < learned[:, None]
    batch = dataclasses.replace(batch, mask_BL=mask_BL, continues_B=torch.zeros(LANES, dtype=torch.bool))
    return batch.split(micro_batch)


def batches_of(chunks: int = 1) -> list[Batch]:
    torch.manual_seed(3)
    batches = [random_batch(rows=ROWS, length=LENGTH * chunks) for _ in range(LANES // ROWS)]
    continues = torch.zeros(ROWS, dtype=torch.bool)
    return [dataclasses.replace(batch, continues_B=continues) for batch in batches]


def correction(engine: Engine) -> Tensor:
    return engine.stages[0].model.get_parameter(CORRECTION).detach().clone()


def chosen_by_hand(engine: Engine, batches: list[Batch]) -> dict[int, Tensor]:
    """Route by topk, from what each layer's mixer reads in a forward pass without a schedule."""
    model = engine.stages[0].model
    loads: dict[int, Tensor] = {}

    def count(index: int, mixer: MoE, x_LBD: Tensor) -> None:
        logits_TE = x_LBD.flatten(0, 1).double() @ mixer.router.double().T
        if mixer.spec.scores == "softmax":
            chosen_TK = logits_TE.topk(mixer.spec.top_k).indices
        else:
            scores_TGS = (logits_TE.sigmoid() + mixer.correction).unflatten(1, (mixer.spec.groups, -1))
            best_TG = scores_TGS.topk(2).values.sum(-1).topk(mixer.options.group_limit).indices
            kept_TG = torch.zeros(scores_TGS.shape[:2]).scatter(1, best_TG, 1.0).bool()
            masked_TE = scores_TGS.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)
            chosen_TK = masked_TE.topk(mixer.spec.top_k).indices
        counted = torch.bincount(chosen_TK.flatten(), minlength=mixer.spec.experts)
        loads[index] = loads.get(index, torch.zeros_like(counted)) + counted

    for index in TOP_K:
        mixer = model.layers[str(index)].mixer
        mixer.register_forward_pre_hook(lambda module, inputs, index=index: count(index, module, inputs[0]))
    with torch.no_grad():
        for batch in batches:
            model(batch.tokens_BL, None, batch.seq)
    return loads


@pytest.mark.parametrize("recompute", ["none", "selective", "layer"])
def test_loads_count_every_token_once(recompute: str, alone: Groups) -> None:
    engine = engine_of(config_of(recompute), alone)
    choices = engine.forward_backward(batches_of()).choices
    expected = chosen_by_hand(engine, batches_of())
    for index, top_k in TOP_K.items():
        assert choices[index].loads_E.dtype == torch.int64
        assert int(choices[index].loads_E.sum()) == LANES * LENGTH * top_k
        assert torch.equal(choices[index].loads_E, expected[index])


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_chunks_of_a_row_are_counted_once(recompute: str, alone: Groups) -> None:
    engine = engine_of(config_of(recompute, chunks=3), alone)
    engine.start_phase(engine.phase, range(LANES))
    choices = engine.forward_backward(batches_of(chunks=3)).choices
    expected = chosen_by_hand(engine, batches_of(chunks=3))
    for index in TOP_K:
        assert torch.equal(choices[index].loads_E, expected[index])


def test_accepted_step_moves_each_correction_towards_the_mean_load(alone: Groups) -> None:
    engine = engine_of(config_of(), alone)
    before = correction(engine)
    loads = engine.forward_backward(batches_of()).choices[3].loads_E.tolist()
    _, accepted = engine.step(1e-3)
    assert accepted
    mean = sum(loads) / len(loads)
    expected = [SPEED * math.copysign(1, mean - load) if load != mean else 0.0 for load in loads]
    assert len(set(expected)) > 1
    torch.testing.assert_close(correction(engine) - before, torch.tensor(expected))


def test_refused_step_moves_no_correction(alone: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(config_of(), alone)
    before = correction(engine)
    monkeypatch.setattr(engine.guard, "accepts", lambda norm, loss: False)
    engine.forward_backward(batches_of())
    _, accepted = engine.step(1e-3)
    assert not accepted
    assert torch.equal(correction(engine), before)
    monkeypatch.undo()
    engine.forward_backward(batches_of())  # the refused step's loads do not count in the next step
    loads_E = chosen_by_hand(engine, batches_of())[3]
    assert torch.equal(engine._loss.choices[3].loads_E, loads_E)


def test_step_without_loss_tokens_moves_no_correction(alone: Groups) -> None:
    engine = engine_of(config_of(), alone)
    before = correction(engine)
    engine.forward_backward([dataclasses.replace(b, mask_BL=torch.zeros_like(b.mask_BL)) for b in batches_of()])
    _, accepted = engine.step(1e-3)
    assert accepted
    assert torch.equal(correction(engine), before)


def test_tokens_without_loss_count_in_loads(alone: Groups) -> None:
    choices = engine_of(config_of(), alone).forward_backward(unevenly_masked(ROWS)).choices
    assert int(choices[3].loads_E.sum()) == LANES * LENGTH * TOP_K[3]


def test_frozen_router_keeps_its_correction(alone: Groups) -> None:
    config = config_of()
    adapters = AdaptersConfig(preset=Adapting.lora, weights=["*"], rank=3)
    engine = engine_of(dataclasses.replace(config, model=dataclasses.replace(config.model, adapters=adapters)), alone)
    before = correction(engine)
    engine.forward_backward(batches_of())
    _, accepted = engine.step(1e-3)
    assert accepted
    assert torch.equal(correction(engine), before)


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_losses_do_not_depend_on_rows_in_a_micro_batch(recompute: str, alone: Groups) -> None:
    """Rows have different numbers of loss tokens, so that a mean over the rows of a micro-batch would differ."""
    steps = []
    for micro_batch in (1, 2, 4):
        engine = engine_of(config_of(recompute), alone)
        engine.forward_backward(unevenly_masked(micro_batch))
        gradients = dict(engine.optimizer.gradients())
        engine.step(1e-3)
        steps.append((gradients, dict(engine.auxiliary)))
    expected, losses = steps[0]
    assert set(losses) == {"balance", "router_z"}
    for gradients, other_losses in steps[1:]:
        assert other_losses == pytest.approx(losses, rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)


def test_frozen_router_adds_no_loss(alone: Groups) -> None:
    """With every router frozen, coefficients change no gradient."""
    gradients = []
    choices: list[dict[str, Any]] = [{}, {"coefficient": 0.0, "z_loss": 0.0}]
    for options in choices:
        config = config_of()
        config.model.layers = config.model.layers | {"e": config.model.layers["e"] | options}
        config.phases[0].train = ["embedding.weight", "layers.*.mixer.down"]
        engine = engine_of(config, alone)
        engine.forward_backward(batches_of())
        gradients.append(dict(engine.optimizer.gradients()))
        engine.step(1e-3)
        assert engine.auxiliary == {}
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])


def test_one_frozen_router_leaves_the_losses_of_others(alone: Groups) -> None:
    config = config_of()
    config.model.pattern = "Mexe"
    whole = engine_of(config, alone)
    whole.forward_backward(batches_of())
    whole.step(1e-3)
    config.phases[0].train = ["layers.1.*"]
    engine = engine_of(config, alone)
    engine.forward_backward(batches_of())
    engine.step(1e-3)
    assert set(engine.auxiliary) == {"balance", "router_z"}
    assert all(0 < loss < whole.auxiliary[name] for name, loss in engine.auxiliary.items())


def test_evaluation_counts_nothing(alone: Groups) -> None:
    engine = engine_of(config_of(), alone)
    before = correction(engine)
    assert engine.loss(batches_of()).choices == {}
    assert engine.losses([(0, batch) for batch in batches_of()], 1).choices == {}
    assert torch.equal(correction(engine), before)


def test_correction_is_not_trained_and_needs_no_optimizer_state(alone: Groups) -> None:
    engine = engine_of(config_of(), alone)
    assert not engine.phase.learns(CORRECTION)
    assert not engine.stages[0].model.get_parameter(CORRECTION).requires_grad
    assert not any(CORRECTION in block.key for block in engine.optimizer.blocks())
    assert any(block.key == CORRECTION for block in engine.blocks()["model"])


def test_signs_are_exact_for_loads_one_token_apart(alone: Groups) -> None:
    """In fp32, 2^40 and 2^40 + 1 are the same number."""
    engine = engine_of(config_of(), alone)
    before = correction(engine)
    loads_E = torch.full((8,), 2**40)
    loads_E[0] += 1
    move_corrections([engine.stages[0].model], {3: Routed(loads_E, torch.zeros(()), torch.tensor(0))})
    moved = (correction(engine) - before).sign()
    assert moved.tolist() == [-1.0] + [1.0] * 7


def test_metrics_of_a_step_have_the_values_computed_by_hand(alone: Groups) -> None:
    engine = engine_of(config_of(), alone)
    loads = engine.forward_backward(batches_of()).choices[3].loads_E.double()
    engine.step(1e-3)
    metrics = engine.router_metrics
    assert list(metrics) == ["layers.1", "layers.3"]
    assert metrics["layers.3"].load_max_over_mean == pytest.approx(float(loads.max() / loads.mean()))
    assert metrics["layers.3"].idle == int((loads == 0).sum())
    assert 0.5 < metrics["layers.3"].entropy <= 1.0


def test_entropy_is_1_for_even_scores_and_0_for_a_single_expert() -> None:
    tokens = 10
    loads_E = torch.tensor([20, 0, 0, 0])
    for scores_TE, expected in (
        (torch.full((tokens, 4), 0.3), 1.0),
        (torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(tokens, 4), 0.0),
    ):
        even_TE = shares(scores_TE)
        entropy = -torch.xlogy(even_TE, even_TE).sum(dtype=torch.float64)
        values = ChoiceValues({7: Routed(loads_E, entropy, torch.tensor(5))}, {7: 2})
        (metrics,) = values.metrics(torch.cat(values.flat).tolist()).values()
        assert metrics.entropy == pytest.approx(expected, abs=1e-6)
        assert (metrics.load_max_over_mean, metrics.idle, metrics.dropped) == (4.0, 3, 0.25)
        assert metrics.rank_max_over_mean == 1.0
        (of_two,) = ChoiceValues(values.choices, {7: 2}, ranks=2).metrics(torch.cat(values.flat).tolist()).values()
        assert of_two.rank_max_over_mean == 2.0
