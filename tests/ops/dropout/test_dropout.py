"""Dropout: shares, rows, places and channels apart, the same draws for any part of the tokens and channels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.ops.dispatch import force
from hybridtron.ops.dropout import DropoutInputs, channel_numbers, dropout, token_numbers

ROWS = 4
LENGTH = 256
CHANNELS = 512
POSITIONS_BL = torch.arange(LENGTH).expand(ROWS, -1)


def dropped(x: Tensor, share: float, seed: int = 0) -> Tensor:
    rows, length, channels = x.shape
    tokens = token_numbers(seed, POSITIONS_BL[:rows, :length], 0)
    return dropout(DropoutInputs(x, tokens, channel_numbers(seed, 0, channels), share))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
def test_dropout_zeroes_the_wanted_share_and_scales_the_rest(share: float) -> None:
    y = dropped(torch.ones(ROWS, LENGTH, CHANNELS), share)
    gone = y == 0
    assert torch.equal(y[~gone], torch.full_like(y[~gone], 1 / (1 - share)))
    for axis, others in ((0, (1, 2)), (1, (0, 2)), (2, (0, 1))):  # also in each row, at each place, of each channel
        count = y.numel() // y.shape[axis]
        spread = 5 * (share * (1 - share) / count) ** 0.5
        assert ((gone.double().mean(others) - share).abs() <= spread).all()


def test_draws_are_independent() -> None:
    """Draws of adjacent rows, places, channels, layers and steps agree in half of the cases, like independent ones."""
    gone = dropped(torch.ones(ROWS, LENGTH, CHANNELS), 0.5) == 0
    other = dropped(torch.ones(ROWS, LENGTH, CHANNELS), 0.5, seed=1) == 0
    neighbours = [gone.roll(shift, axis) for axis in range(3) for shift in (1, 3, 33)]
    for neighbour in (*neighbours, other):
        agree = (gone == neighbour).double().mean()
        assert abs(agree - 0.5) < 5 * 0.5 / gone.numel() ** 0.5


def test_tokens_of_two_documents_at_equal_positions_draw_apart() -> None:
    same_BL = torch.zeros(1, 2, dtype=torch.long)
    first, second = token_numbers(3, same_BL, 0)[0]
    assert first != second
    assert token_numbers(3, same_BL, 1)[0, 0] == second


def test_slices_of_tokens_and_channels_draw_as_the_whole() -> None:
    x = torch.randn(ROWS, LENGTH, CHANNELS)
    tokens = token_numbers(7, POSITIONS_BL[:, 64:128], 64)
    part = dropout(DropoutInputs(x[:, 64:128, 128:384], tokens, channel_numbers(7, 128, 256), 0.3))
    assert torch.equal(part, dropped(x, 0.3, seed=7)[:, 64:128, 128:384])


def test_gradients_are_zero_where_values_are_dropped() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropped(x, 0.4), x)
    with force(dropout="reference"):
        (grad,) = torch.autograd.grad(dropped(x, 0.4).sum(), x)
    assert torch.equal(grad == 0, dropped(torch.ones_like(x), 0.4) == 0)
