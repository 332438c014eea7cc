"""Perplexity far beyond the context, beside that of the same tokens within it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from examples.long_text import Beyond, Curve, losses_within
from hybridtron.data.batch import SeqInfo
from hybridtron.model.generate import reader
from hybridtron.model.lm import LanguageModel
from tests.conftest import small_model

CONTEXT, LENGTH = 8, 24


@torch.no_grad()
def loss_at(model: LanguageModel, tokens_BT: torch.Tensor, start: int, position: int) -> torch.Tensor:
    """Of the token after `position` tokens, of which the first `start` are not shown."""
    shown_BL = tokens_BT[:, start:position]
    logits_BV = model(shown_BL, None, SeqInfo.stream(*shown_BL.shape)).output[-1]
    return F.cross_entropy(logits_BV, tokens_BT[:, position])


@pytest.mark.parametrize("pattern", ["M-W-", "S", "F"])
def test_every_token_is_read_behind_half_a_context_to_a_whole(pattern: str) -> None:
    """By hand: rows begin at every half context, and a token is read in the last but one before it."""
    model, tokens_BT = small_model(pattern, torch.float64), torch.randint(61, (3, LENGTH + 1))
    starts = {position: max(0, (position - 1) // 4 * 4 - 4) for position in range(1, LENGTH + 1)}
    assert all(position - start in range(5, CONTEXT + 1) for position, start in starts.items() if position > CONTEXT)
    by_hand = [loss_at(model, tokens_BT, start, position) for position, start in starts.items()]
    found = losses_within(reader(model), tokens_BT, CONTEXT)
    torch.testing.assert_close(found, torch.stack(by_hand), rtol=1e-6, atol=1e-6)


def test_what_does_not_look_back_does_not_rise() -> None:
    """MLPs alone: both readings are the same, however hard the text is in places."""
    model, tokens_BT = small_model("--", torch.float64), torch.randint(61, (3, LENGTH + 1))
    found = Beyond.of(reader(model), tokens_BT, CONTEXT)
    assert found.risen(LENGTH) == pytest.approx(0, abs=1e-9)
    assert len(set(found.curve.perplexities)) == len(found.curve.ends)


def test_a_rise_is_that_of_the_bin() -> None:
    found = Beyond(Curve([8, 16, 32], [4.0, 6.0, 9.0]), Curve([8, 16, 32], [4.0, 5.0, 6.0]))
    assert found.risen(16) == found.risen(31) == pytest.approx(math.log(1.2))
    assert found.risen(32) == pytest.approx(math.log(1.5))
