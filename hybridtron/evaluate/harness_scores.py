"""Log-likelihoods for lm-evaluation-harness, each over the last tokens of a row.

Legend: B rows, T tokens, L = T - 1 labels, C labels of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtron.evaluate.length import fitting_chunk, label_losses, of_labels
from hybridtron.evaluate.served import Served
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.loss import likeliest

Scored = tuple[Sequence[int], int]  # tokens, and the number of last tokens to score
Score = tuple[float, bool]  # sum of log q, and True if every scored token is the likeliest


@torch.no_grad()
def scored_rows(model: Served, rows: Sequence[Scored]) -> list[Score]:
    """Score each row's last tokens. Every row must have at least one token before them."""
    longest = max(len(tokens) for tokens, _ in rows)
    # padding on the right does not change the predictions before it
    tokens_BT = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in rows])
    chunk = fitting_chunk(model.config.model, len(tokens_BT), model.read.context.size)
    losses_LB, likeliest_LB = of_labels(model.read, tokens_BT, chunk, _loss_and_likeliest, (2,)).unbind(-1)
    ends = [(row, len(tokens) - 1, scored) for row, (tokens, scored) in enumerate(rows)]
    return [
        (-losses_LB[end - scored : end, row].sum().item(), bool(likeliest_LB[end - scored : end, row].all()))
        for row, end, scored in ends
    ]


def _loss_and_likeliest(labels_CB: Tensor, stage: LanguageModel, x_CBD: Tensor) -> Tensor:
    """Return -log q, and 1 where the label is the likeliest token: (C, B, 2)."""
    losses_CB = label_losses(labels_CB, stage, x_CBD)
    is_likeliest_CB = likeliest(x_CBD, stage.output_weight(), stage.slice.tensor) == labels_CB
    return torch.stack((losses_CB, is_likeliest_CB.to(losses_CB.dtype)), dim=-1)
