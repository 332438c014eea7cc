"""Work of sequence shards, compared with keys counted one by one."""

from __future__ import annotations

import pytest

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.load import load
from hybridtron.planning.count import count
from hybridtron.planning.share_balance import Spans, imbalance, keys_seen, token_costs
from hybridtron.planning.step_seconds import count_of_last_share

LENGTH = 64
SHARES = 4
ROWS = {
    "one document": [(0, 64)],
    "at a cut": [(0, 16), (16, 64)],
    "short beside long": [(0, 5), (5, 11), (11, 14), (14, 64)],
    "single tokens": [(0, 1), (1, 31), (31, 32), (32, 33), (33, 64)],
}


@pytest.mark.parametrize("window", [None, 2, 9, 64])
@pytest.mark.parametrize("name", ROWS)
def test_keys_that_are_seen(name: str, window: int | None) -> None:
    spans = ROWS[name]
    for first in range(0, LENGTH, 16):
        wanted = 0
        for token in range(first, first + 16):
            (begin,) = [a for a, b in spans if a <= token < b]
            wanted += sum(1 for key in range(begin, token + 1) if window is None or token - key < window)
        assert keys_seen(spans, (first, first + 16), window) == wanted


def test_shares_together_compute_what_a_row_does_and_the_last_most() -> None:
    model = load(["recipe=llama2_438m"]).model
    whole = [(0, 8192)]
    found = token_costs(model, 8192).of_shares([whole, whole], 8192, SHARES)
    assert sum(found) == pytest.approx(2 * 8192 * count(model, 8192).forward_flops)
    last = count_of_last_share(model, 8192, SHARES)
    assert found[-1] == max(found) == pytest.approx(2 * 2048 * sum(layer.forward_flops for layer in last.layers)
                                                    + 2 * 2048 * last.head_flops)  # fmt: skip
    assert imbalance(found) == pytest.approx(found[-1] / (sum(found) / SHARES))


def uneven(model: ModelConfig, rows: list[Spans]) -> float:
    return imbalance(token_costs(model, 8192).of_shares(rows, 8192, SHARES))


def test_short_documents_beside_a_long_one() -> None:
    """The balance hardly changes for windows; recurrences are balanced for any documents."""
    short_first = [(at, at + 64) for at in range(0, 6144, 64)] + [(6144, 8192)]
    full, recurrent = (load([f"recipe={name}"]).model for name in ("llama2_438m", "mamba2_130m"))
    assert uneven(recurrent, [short_first]) == 1
    assert uneven(full, [short_first]) > 1.05
    assert uneven(full, [[(0, 2048), (2048, 4096), (4096, 6144), (6144, 8192)]]) == pytest.approx(1)
