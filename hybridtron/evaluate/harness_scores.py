"""Log-likelihoods of the last tokens of rows, as lm-evaluation-harness asks for them.

Legend: B rows, T tokens, L = T - 1 labels, C labels of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hybridtron.evaluate.length import chunk_ends, fitting_chunk, label_losses, read_chunks, unheard
from hybridtron.evaluate.served import Served
from hybridtron.model.generate import Finish
from hybridtron.model.lm import LanguageModel
from hybridtron.model.stack import States
from hybridtron.parallel.loss import likeliest

Scored = tuple[Sequence[int], int]  # tokens, and how many of the last ones are scored
Score = tuple[float, bool]  # sum of log q, and whether each is the likeliest


@torch.no_grad()
def scored_rows(model: Served, rows: Sequence[Scored]) -> list[Score]:
    """Of each row; every row has a token before those that are scored."""
    longest = max(len(tokens) for tokens, _ in rows)
    # padded on the right: what follows changes nothing before it
    tokens_BT = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in rows])
    losses_LB, likeliest_LB = _of_every_label(model, tokens_BT)
    ends = [(row, len(tokens) - 1, scored) for row, (tokens, scored) in enumerate(rows)]
    return [
        (-losses_LB[end - scored : end, row].sum().item(), bool(likeliest_LB[end - scored : end, row].all()))
        for row, end, scored in ends
    ]


def _of_every_label(model: Served, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """-log q of each token after the first, and 1 where it is the likeliest one: (L, B) in float64 on the CPU."""
    reader, labels_LB = model.read, tokens_BT[:, 1:].T
    dtype, found = torch.promote_types(reader.dtype, torch.float32), []

    def wanted(start: int, end: int) -> Finish:
        labels_CB = labels_LB[start:end].to(reader.device)
        return Finish(partial(_loss_and_likeliest, labels_CB), (2, *labels_CB.shape), dtype)

    def see(end: int, found_2CB: Tensor, states: States) -> None:
        found.append(found_2CB.double().cpu())

    ends = chunk_ends(fitting_chunk(model.config.model, len(tokens_BT)), len(labels_LB))
    read_chunks(reader, tokens_BT[:, :-1], ends, wanted, see, unheard)
    losses_LB, likeliest_LB = torch.cat(found, dim=1)
    return losses_LB, likeliest_LB


def _loss_and_likeliest(labels_CB: Tensor, stage: LanguageModel, x_CBD: Tensor) -> Tensor:
    losses_CB = label_losses(labels_CB, stage, x_CBD)
    is_likeliest_CB = likeliest(x_CBD, stage.output_weight(), stage.slice.tensor) == labels_CB
    return torch.stack((losses_CB, is_likeliest_CB.to(losses_CB.dtype)))
