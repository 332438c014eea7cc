"""Work of sequence shards, compared with keys counted one by one."""

from __future__ import annotations

import pytest

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.planning.context_balance import Spans, imbalance, keys_seen, token_costs
from hybridtron.planning.count import count
from hybridtron.planning.step_time import count_of_last_shard

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
def test_counts_of_visible_keys_equal_a_count_one_by_one(name: str, window: int | None) -> None:
    spans = ROWS[name]
    for first in range(0, LENGTH, 16):
        wanted = 0
        for token in range(first, first + 16):
            (begin,) = [a for a, b in spans if a <= token < b]
            wanted += sum(1 for key in range(begin, token + 1) if window is None or token - key < window)
        assert keys_seen(spans, (first, first + 16), window) == wanted


def test_costs_of_shards_add_up_to_the_row_and_the_last_is_largest() -> None:
    model = load(["recipe=llama2_438m"]).model
    whole = [(0, 8192)]
    costs = token_costs(architecture(model), 8192).of_shards([whole, whole], 8192, SHARES)
    assert sum(costs) == pytest.approx(2 * 8192 * count(architecture(model), 8192).forward_flops)
    last = count_of_last_shard(architecture(model), 8192, SHARES)
    assert costs[-1] == max(costs) == pytest.approx(2 * 2048 * sum(layer.forward_flops for layer in last.layers)
                                                    + 2 * 2048 * last.head_flops)  # fmt: skip
    assert imbalance(costs) == pytest.approx(costs[-1] / (sum(costs) / SHARES))


def uneven(model: ModelConfig, rows: list[Spans]) -> float:
    return imbalance(token_costs(architecture(model), 8192).of_shards(rows, 8192, SHARES))


def test_imbalance_depends_on_documents_for_full_attention_alone() -> None:
    """The balance hardly changes for windows; recurrences are balanced for any documents."""
    short_first = [(at, at + 64) for at in range(0, 6144, 64)] + [(6144, 8192)]
    full, recurrent = (load([f"recipe={name}"]).model for name in ("llama2_438m", "mamba2_130m"))
    assert uneven(recurrent, [short_first]) == 1
    assert uneven(full, [short_first]) > 1.05
    assert uneven(full, [[(0, 2048), (2048, 4096), (4096, 6144), (6144, 8192)]]) == pytest.approx(1)
