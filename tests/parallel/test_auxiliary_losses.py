"""Training with an auxiliary loss: a mixer's own scalar enters the backward pass on the stage that holds the mixer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.data.batch import SeqInfo
from hybridtron.engine.engine import Engine
from hybridtron.mixers.base import MixerOutput, State
from hybridtron.mixers.swiglu import SwiGLU
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Layout, small, small_model
from tests.distributed import run_distributed


@contextmanager
def penalized() -> Iterator[None]:
    """MLPs ask for small outputs."""
    plain = SwiGLU.forward

    def forward(self: SwiGLU, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        out = plain(self, x_LBD, state, seq)
        return MixerOutput(out.y_LBD, out.state, {"output_size": 10 * out.y_LBD.square().mean()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwiGLU, "forward", forward)
        patch.setattr(SwiGLUSpec, "auxiliary", ("output_size",))
        yield


def configured(layout: Layout) -> Config:
    model = small_model("M-W-", tied=False, heads={"kv_heads": 2})
    config = small(model, layout.on(ParallelConfig()), Documents.isolate, data=1)
    return replace(config, optim=replace(config.optim, z_loss=0.0))


def gradients_of(seat: Seat, config: Config) -> dict[str, Tensor]:
    with seat.groups(config.parallel) as groups:
        return gradients_in(groups, config)


def gradients_in(groups: Groups, config: Config) -> dict[str, Tensor]:
    with penalized():
        engine = Engine(resolve(config)[0], groups)
        engine.forward_backward(micro_batches(resolve(config)[0]))
        return {name: gradient.clone() for name, gradient in engine.optimizer.gradients()}


def gradients_by_hand(config: Config, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute both losses of each micro-batch, weighted by its tokens, in plain PyTorch."""
    model = LanguageModel(architecture(config.model))
    model.load_state_dict(weights)
    total = torch.zeros(())
    tokens = 0
    with penalized():
        for batch in micro_batches(resolve(config)[0]):
            out = model(batch.tokens_BL, None, batch.seq)
            logits_NV = out.output.transpose(0, 1)[batch.mask_BL]
            counted = int(batch.mask_BL.sum())
            total = total + functional.cross_entropy(logits_NV, batch.labels_BL[batch.mask_BL], reduction="sum")
            total = total + counted * out.aux["output_size"]
            tokens = tokens + counted
    (total / tokens).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_gradient_of_an_auxiliary_loss_is_added_to_that_of_the_loss(alone: Groups) -> None:
    config = configured(Layout())
    ours = gradients_in(alone, config)
    engine = Engine(resolve(config)[0], alone)
    engine.forward_backward(micro_batches(resolve(config)[0]))
    without = dict(engine.optimizer.gradients())
    assert_same(ours, gradients_by_hand(config, dict(engine.weights())))
    name = "layers.1.mixer.down.weight"
    assert not torch.allclose(ours[name], without[name], rtol=0.1)


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [Layout(pipeline=2), Layout(tensor=2)], ids=["pp2", "tp2"])
def test_auxiliary_losses_in_layouts_have_the_gradients_of_one_process(layout: Layout) -> None:
    (serial,) = run_distributed(gradients_of, 1, configured(Layout()))
    (ours, *_) = run_distributed(gradients_of, 2, configured(layout))
    assert_same(ours, serial)
