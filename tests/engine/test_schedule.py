"""Losses and gradients of a step: the mean over tokens, however the rows are cut into micro-batches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import ParallelConfig
from hybridtron.data.batch import Batch
from hybridtron.engine.engine import Engine
from hybridtron.engine.schedule import with_auxiliary_losses
from hybridtron.engine.stage import data_parallel
from hybridtron.parallel.groups import Groups
from hybridtron.problems import ConfigError
from tests.conftest import random_batch, small_config, small_model, small_run


def rows_of(batch: Batch, first: int, last: int) -> Batch:
    seq = dataclasses.replace(batch.seq, positions_BL=batch.seq.positions_BL[first:last], _rope={})
    return Batch(batch.tokens_BL[first:last], batch.labels_BL[first:last], batch.mask_BL[first:last], seq)


def test_micro_batches_with_unequal_masks_equal_one_batch(alone: Groups) -> None:
    batch = random_batch(rows=4)
    batch.mask_BL[0] = False
    batch.mask_BL[1, 3:] = False
    config = small_run(small_config("M-W-F"))
    whole = Engine(resolve(config)[0], alone)
    cut = Engine(resolve(config)[0], alone)
    loss = whole.forward_backward([batch])
    pieces = [rows_of(batch, 0, 1), rows_of(batch, 1, 2), rows_of(batch, 2, 3), rows_of(batch, 3, 4)]
    torch.testing.assert_close(cut.forward_backward(pieces).mean, loss.mean, rtol=1e-6, atol=0)
    gradients = dict(cut.optimizer.gradients())
    for name, gradient in whole.optimizer.gradients():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name


def test_losses_of_parts_equal_the_losses_of_their_batches(alone: Groups) -> None:
    batch = random_batch(rows=4)
    engine = Engine(resolve(small_run(small_config("M-W-F")))[0], alone)
    batch.mask_BL[1, 3:] = False
    pieces = [rows_of(batch, row, row + 1) for row in range(4)]
    losses = engine.losses(list(zip([2, 0, 2, 0], pieces, strict=True)), 3)
    for part, batches in ((0, [pieces[1], pieces[3]]), (2, [pieces[0], pieces[2]])):
        expected = engine.loss(batches)
        assert losses.tokens[part] == expected.tokens
        assert losses.total[part] == expected.total
    assert losses.tokens[1] == losses.total[1] == 0


def test_loss_is_the_mean_cross_entropy_over_unmasked_tokens(alone: Groups) -> None:
    batch = random_batch()
    engine = Engine(resolve(small_run())[0], alone)
    plain = small_model()
    plain.load_state_dict(dict(engine.weights()))
    logits_BLV = plain(batch.tokens_BL, None, batch.seq).output.transpose(0, 1)
    expected = torch.nn.functional.cross_entropy(logits_BLV[batch.mask_BL], batch.labels_BL[batch.mask_BL])
    expected.backward()
    torch.testing.assert_close(engine.forward_backward([batch]).mean.float(), expected.detach())
    for name, gradient in engine.optimizer.gradients():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)


def test_step_with_all_tokens_masked_has_no_gradient(alone: Groups) -> None:
    batch = random_batch()
    engine = Engine(resolve(small_run())[0], alone)
    batch.mask_BL[:] = False
    assert engine.forward_backward([batch]).mean == 0
    assert not any(gradient.any() for _, gradient in engine.optimizer.gradients())


def of_step(engine: Engine, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the loss, the counted tokens and every gradient of a step with two micro-batches."""
    loss = engine.forward_backward(batch.split(2))
    return {"loss": loss.total, "tokens": loss.tokens, **{k: v.clone() for k, v in engine.optimizer.gradients()}}


def test_masked_labels_change_no_bit(alone: Groups) -> None:
    batch = random_batch(rows=4)
    config = small_run(small_config("M-S-W-F"))
    batch.mask_BL[:2] = False  # of the first micro-batch nothing is learned
    labels_BL = torch.where(batch.mask_BL, batch.labels_BL, (batch.labels_BL + 7) % 61)
    relabeled = dataclasses.replace(batch, labels_BL=labels_BL)
    before, after = (of_step(Engine(resolve(config)[0], alone), b) for b in (batch, relabeled))
    assert not torch.equal(labels_BL, batch.labels_BL)
    assert 0 < before["tokens"] == batch.mask_BL.sum()
    assert all(torch.equal(before[name], after[name]) for name in after)
    labels_BL[3] = batch.labels_BL[3].flip(0)
    assert not torch.equal(of_step(Engine(resolve(config)[0], alone), relabeled)["loss"], before["loss"])


def test_documents_with_all_labels_masked_change_no_bit(alone: Groups) -> None:
    """Exchange a document's tokens, and so its labels, between others in packed rows, which do not see it."""
    batch = random_batch(rows=4, documents=[[10, 6, 8], [3, 13, 8], [8, 8, 8], [1, 20, 3]])
    documents_BL = batch.seq.documents_BL
    config = small_run(small_config("M-S-W-F"))
    assert documents_BL is not None
    batch.mask_BL[:, :-1] &= documents_BL[:, :-1] == documents_BL[:, 1:]
    batch.mask_BL[documents_BL == 1] = False
    inside = documents_BL == 1
    tokens_BT = torch.cat([batch.tokens_BL, batch.labels_BL[:, -1:]], 1)
    tokens_BT[:, :-1] = torch.where(inside, (tokens_BT[:, :-1] + 7) % 61, tokens_BT[:, :-1])
    changed = Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], batch.mask_BL, batch.seq)
    before, after = (of_step(Engine(resolve(config)[0], alone), b) for b in (batch, changed))
    assert all(torch.equal(before[name], after[name]) for name in after)


def test_auxiliary_losses_enter_the_backward_pass() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    stream = torch.ones(3, requires_grad=True)
    output = with_auxiliary_losses(stream, [5 * weight**2])
    output.sum().backward()
    assert torch.equal(output, stream)
    assert output._base is None  # Megatron frees what a stage has sent, which can't be a view
    assert weight.grad == 2 * 2.0 * 5
    assert torch.equal(stream.grad, torch.ones(3))


def test_gathering_ahead_with_virtual_stages_is_refused_over_gloo(alone: Groups) -> None:
    """Messages of several types are mixed up there: the last weights of a stage came out wrong."""
    config = small_run()
    config.parallel = ParallelConfig(pipeline=2, virtual_pipeline=2, overlap_param_gather=True)
    with pytest.raises(ConfigError) as refused:
        data_parallel([], config, alone, torch.float32)
    assert [(p.key, p.code) for p in refused.value.problems] == [("parallel.overlap_param_gather", "unsupported")]
