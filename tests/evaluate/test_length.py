"""The instruments of length generalization against readings in one piece, hand loops and hand formulas."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch.nn import functional as F

from hybridtron.data.batch import SeqInfo
from hybridtron.evaluate.length import (
    Remembrance,
    distances,
    effective_remembrance,
    perplexity_bins,
    position_losses,
    state_deviation,
)
from hybridtron.inference.reader import reader
from hybridtron.model.lm import LanguageModel
from tests.conftest import small_model

PATTERNS = ["M", "S", "W", "F", "M-W-S-F-"]
LENGTH = 37  # more than four windows of the attention; no chunk below divides it
CHUNKS = [1, 5, 16, 64]
ANGLES = 1e-7  # rotary angles are in fp32 whatever the model is in, and x_t:T counts its positions from 0


def tokens(rows: int = 3, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(61, (rows, length))


def wide(pattern: str) -> LanguageModel:
    return small_model(pattern, torch.float64)


@torch.no_grad()
def read_whole(model: LanguageModel, tokens_BL: torch.Tensor):
    return model(tokens_BL, None, SeqInfo.stream(*tokens_BL.shape))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_losses_by_position_equal_a_loop_by_hand(pattern: str) -> None:
    model = wide(pattern)
    tokens_BT = tokens()
    logits_LBV = read_whole(model, tokens_BT[:, :-1]).output
    by_hand = [F.cross_entropy(logits_LBV[i], tokens_BT[:, i + 1]) for i in range(LENGTH - 1)]
    for chunk in CHUNKS:
        losses_L = position_losses(reader(model), tokens_BT, chunk)
        assert losses_L.dtype == torch.float64
        torch.testing.assert_close(losses_L, torch.stack(by_hand), rtol=1e-9, atol=1e-9)


def test_a_position_reads_earlier_tokens_only() -> None:
    model = wide("M-S-W")
    tokens_BT = tokens(1)
    changed_BT = tokens_BT.clone()
    changed_BT[:, 20] = (changed_BT[:, 20] + 1) % 61
    before, after = (position_losses(reader(model), one, 7) for one in (tokens_BT, changed_BT))
    assert torch.equal(before[:19], after[:19])  # entry 19 is the prediction of token 20
    assert (before[19:] != after[19:]).all()


def test_bf16_losses_are_summed_in_fp64() -> None:
    model = small_model("M-S-").cast(torch.bfloat16)
    tokens_BT = tokens(8)
    logits_LBV = read_whole(model, tokens_BT[:, :-1]).output
    assert logits_LBV.dtype == torch.bfloat16
    nll_LB = F.cross_entropy(logits_LBV.double().movedim(2, 1), tokens_BT[:, 1:].T, reduction="none")
    torch.testing.assert_close(position_losses(reader(model), tokens_BT, 64), nll_LB.mean(1), rtol=1e-6, atol=1e-6)


def test_bins_double_from_the_training_length_on() -> None:
    losses_L = torch.arange(1.0, 12.0, dtype=torch.float64) / 10
    bins = perplexity_bins(losses_L, 2)
    assert [(part.first, part.last) for part in bins] == [(1, 2), (3, 4), (5, 8), (9, 11)]
    assert [part.perplexity for part in bins] == pytest.approx([math.exp(x) for x in (0.15, 0.35, 0.65, 1.0)])
    assert [part[:2] for part in perplexity_bins(losses_L[:8], 4)] == [(1, 4), (5, 8)]
    assert [part[:2] for part in perplexity_bins(losses_L, 50)] == [(1, 11)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_remembrance_compares_full_rows_with_their_ends(pattern: str) -> None:
    model = wide(pattern)
    tokens_BT = tokens()
    ts = [0, 3, 20, LENGTH - 1]

    def after(t: int) -> torch.Tensor:
        return read_whole(model, tokens_BT[:, t:]).output[-1].softmax(-1)

    for chunk in CHUNKS:
        for measured, t in zip(effective_remembrance(reader(model), tokens_BT, ts, chunk), ts, strict=True):
            assert measured.t == t
            variation = (after(0) - after(t)).abs().sum(-1).mean() / 2
            assert measured.total_variation == pytest.approx(variation.item(), abs=1e-10)
            assert (measured.total_variation > ANGLES) == (t > 0 and not (pattern == "W" and t < LENGTH - 8))


def test_windowed_attention_remembers_its_window() -> None:
    measured = effective_remembrance(reader(wide("W")), tokens(), [LENGTH - 9, LENGTH - 8, LENGTH - 7], 5)
    assert measured[0].total_variation < ANGLES
    assert measured[1].total_variation < ANGLES
    assert measured[2].total_variation > ANGLES


def test_a_model_without_a_past_remembers_nothing() -> None:
    for measured in effective_remembrance(reader(wide("--")), tokens(), [0, 1, 18, LENGTH - 1], 5):
        assert measured[1:] == pytest.approx((0, 0, 0), abs=1e-7)


def test_texts_without_predictions_are_refused() -> None:
    for t in (-1, LENGTH):
        with pytest.raises(ValueError, match=str(t)):
            effective_remembrance(reader(wide("M")), tokens(), [t], 5)


def by_hand(p: list[float], q: list[float]) -> tuple[float, float, float]:
    pairs = [(a, b, (a + b) / 2) for a, b in zip(p, q, strict=True)]
    bits = sum(x / 2 * math.log2(x / m) for a, b, m in pairs for x in (a, b) if x)
    dot = sum(a * b for a, b, _ in pairs) / math.hypot(*p) / math.hypot(*q)
    return sum(abs(a - b) for a, b, _ in pairs) / 2, math.sqrt(bits), 1 - dot


def test_distances_between_predictions_follow_the_formulas() -> None:
    p = [[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]
    q = [[0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 0.0]]
    measured = torch.stack(distances(torch.tensor(p).double(), torch.tensor(q).double()), dim=1)
    for row, expected in zip(measured.tolist(), map(by_hand, p, q), strict=True):
        assert row == pytest.approx(expected, abs=1e-7)
    assert measured[1].tolist() == pytest.approx([1, 1, 1])  # nothing in common: as far as it goes


def test_distances_are_averaged_over_rows() -> None:
    model = wide("M-S-")
    tokens_BT = tokens(4)
    together = effective_remembrance(reader(model), tokens_BT, [9], 8)[0]
    alone = [effective_remembrance(reader(model), row[None], [9], 8)[0] for row in tokens_BT]
    assert together == pytest.approx(Remembrance(*(sum(values) / 4 for values in zip(*alone, strict=True))))


@pytest.mark.parametrize(("every", "chunk"), [(8, 5), (5, 8), (6, 64), (37, 10), (1, 4)])
def test_state_deviations_equal_those_of_the_states(every: int, chunk: int) -> None:
    model = wide("M-W-S-F-")
    tokens_BT = tokens()
    measured = state_deviation(reader(model), tokens_BT, every, chunk)
    positions = range(every, LENGTH + 1, every)
    assert [(deviation.position, deviation.layer) for deviation in measured] == [
        (p, layer) for p in positions for layer in (0, 4)
    ]
    for position, layer, deviations in measured:
        h = read_whole(model, tokens_BT[:, :position]).states[layer]["ssm"]
        heads = [h] if layer == 0 else h.unbind(1)
        assert (h.dim(), len(deviations)) == ((3, 1) if layer == 0 else (4, 8))
        expected = [torch.std(deviation, correction=0).item() for deviation in heads]
        assert list(deviations) == pytest.approx(expected, rel=1e-9)


def test_models_without_recurrent_states_have_no_deviations() -> None:
    assert state_deviation(reader(wide("W-F-")), tokens(), 8, 8) == []


def test_progress_counts_every_token_read() -> None:
    model = wide("M")
    tokens_BT = tokens()
    read = []
    position_losses(reader(model), tokens_BT, 10, read.append)
    assert read == [10, 10, 10, 6]
    read.clear()
    effective_remembrance(reader(model), tokens_BT, [0, 30], 10, read.append)
    assert sum(read) == LENGTH + LENGTH - 30
    read.clear()
    state_deviation(reader(model), tokens_BT, 9, 10, read.append)
    assert sum(read) == LENGTH


def test_only_one_chunk_is_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide("M-S-")
    alive = weakref.WeakSet()
    most = []
    forward = model.forward

    def watched(tokens_BL, states, seq, logits):
        assert not logits
        out = forward(tokens_BL, states, seq, logits=logits)
        assert not out.output.requires_grad
        alive.add(out.output)
        most.append(len(alive))
        return out

    monkeypatch.setattr(model, "forward", watched)
    position_losses(reader(model), tokens(), 5)
    effective_remembrance(reader(model), tokens(), [0, 7], 5)
    state_deviation(reader(model), tokens(), 4, 5)
    assert max(most) == 1
