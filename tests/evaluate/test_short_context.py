"""Tokens that are read within the training length, against readings one by one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hybridtron.data.batch import SeqInfo
from hybridtron.evaluate.length import position_losses
from hybridtron.evaluate.short_context import losses_within, short_rows
from hybridtron.inference.reader import reader
from hybridtron.model.lm import LanguageModel
from tests.conftest import small_model


@torch.no_grad()
def loss_at(model: LanguageModel, tokens_BT: torch.Tensor, start: int, position: int) -> torch.Tensor:
    """Return the loss of the token after `position` tokens, where the first `start` are not shown."""
    shown_BL = tokens_BT[:, start:position]
    logits_BV = model(shown_BL, None, SeqInfo.stream(*shown_BL.shape)).output[-1]
    return F.cross_entropy(logits_BV, tokens_BT[:, position])


@pytest.mark.parametrize("pattern", ["M-W-", "S", "F"])
@pytest.mark.parametrize("chunk", [3, 64])
def test_losses_within_a_window_equal_those_of_shortened_texts(pattern: str, chunk: int) -> None:
    """Rows of 8 tokens begin at every fourth: token 9 is read in the second, which begins after four."""
    model = small_model(pattern, torch.float64)
    tokens_BT = torch.randint(61, (3, 25))
    starts = [0] * 8 + [4] * 4 + [8] * 4 + [12] * 4 + [16] * 4
    by_hand = [loss_at(model, tokens_BT, start, position) for position, start in enumerate(starts, 1)]
    losses = losses_within(reader(model), tokens_BT, 8, chunk)
    assert losses.dtype == torch.float64
    torch.testing.assert_close(losses, torch.stack(by_hand), rtol=1e-6, atol=1e-6)


def test_short_texts_are_read_once() -> None:
    model = small_model("M-W-", torch.float64)
    tokens_BT = torch.randint(61, (3, 25))
    for seq_len in (24, 100):
        assert torch.equal(
            losses_within(reader(model), tokens_BT, seq_len, 7), position_losses(reader(model), tokens_BT, 7)
        )


@pytest.mark.parametrize("length", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 8])
def test_predictions_count_once_and_see_half_the_training_length(length: int, seq_len: int) -> None:
    counted = [
        (end, start) for start, before, last in short_rows(length, seq_len) for end in range(before + 1, last + 1)
    ]
    assert [position for position, _ in counted] == list(range(1, length + 1))
    for position, start in counted:
        assert min(position, seq_len // 2 + 1) <= position - start <= seq_len
