"""The table of learning rates over widths: its models, its rows of text, and its bold cells."""

from __future__ import annotations

import torch

from hybridtron.architecture.table import architecture
from studies.mup_rates import BASE, LENGTH, ROWS, VOCABULARY, loss_after, model_of, rows_of, table_of

STEPS = 8


def test_mup_changes_losses_at_other_widths_alone() -> None:
    assert loss_after(BASE, True, 3e-3, STEPS) == loss_after(BASE, False, 3e-3, STEPS)
    assert loss_after(2 * BASE, True, 3e-3, STEPS) != loss_after(2 * BASE, False, 3e-3, STEPS)


def test_sizes_grow_in_proportion_to_the_width() -> None:
    small, large = (architecture(model_of(width, True)) for width in (BASE, 4 * BASE))
    assert large.table["layers.1.mixer.down.weight"].shape == (128, 352)
    assert small.table["layers.1.mixer.down.weight"].shape == (32, 88)
    assert large.model.vocab_size == VOCABULARY
    assert large.table["head.weight"].lr_factor == 1 / 4


def test_rows_are_the_same_for_every_run() -> None:
    assert torch.equal(rows_of(3), rows_of(3))
    assert not torch.equal(rows_of(3), rows_of(4))
    assert rows_of(0).shape == (ROWS, LENGTH + 1)


def test_the_lowest_loss_of_a_line_is_bold() -> None:
    losses = {(transfer, 32, rate): 2.0 - rate * transfer for transfer in (True, False) for rate in (0.1, 0.2)}
    losses[False, 32, 0.1] = 1.5
    assert table_of(losses, [32], [0.1, 0.2]).splitlines() == [
        "| | width | 0.1 | 0.2 |",
        "|---|---|---|---|",
        "| muP | 32 | 1.900 | **1.800** |",
        "| standard | 32 | **1.500** | 2.000 |",
    ]
