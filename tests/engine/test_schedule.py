"""Gradients of a step: the mean over tokens, however the rows are cut into micro-batches."""

from __future__ import annotations

import dataclasses

import torch

from hybridtron.data.batch import Batch
from hybridtron.engine.schedule import forward_backward
from tests.conftest import random_batch, small_model

CPU = torch.device("cpu")


def rows_of(batch: Batch, first: int, last: int) -> Batch:
    seq = dataclasses.replace(batch.seq, positions_BL=batch.seq.positions_BL[first:last], _rope={})
    return Batch(batch.tokens_BL[first:last], batch.labels_BL[first:last], batch.mask_BL[first:last], seq)


def test_micro_batches_with_unequal_masks_equal_one_batch() -> None:
    batch = random_batch(rows=4)
    batch.mask_BL[0] = False
    batch.mask_BL[1, 3:] = False
    whole, cut = (small_model("M-W-F", torch.float64) for _ in range(2))
    loss = forward_backward(whole, [batch], 0.0, CPU)
    pieces = [rows_of(batch, 0, 1), rows_of(batch, 1, 2), rows_of(batch, 2, 4)]
    torch.testing.assert_close(forward_backward(cut, pieces, 0.0, CPU), loss)
    for (name, a), b in zip(whole.named_parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)


def test_loss_is_the_mean_cross_entropy_over_unmasked_tokens() -> None:
    batch, model = random_batch(), small_model()
    logits_BLV = model(batch.tokens_BL, None, batch.seq).output.transpose(0, 1)
    expected = torch.nn.functional.cross_entropy(logits_BLV[batch.mask_BL], batch.labels_BL[batch.mask_BL])
    torch.testing.assert_close(forward_backward(model, [batch], 0.0, CPU), expected.detach())


def test_a_step_whose_tokens_are_all_masked_has_no_gradient() -> None:
    batch, model = random_batch(), small_model()
    batch.mask_BL[:] = False
    assert forward_backward(model, [batch], 0.0, CPU) == 0
    assert all(not weight.grad.any() for weight in model.parameters() if weight.grad is not None)
