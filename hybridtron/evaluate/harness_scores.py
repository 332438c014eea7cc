"""Log-likelihoods of the last tokens of rows, as lm-evaluation-harness asks for them: of a whole model, or of one that
is cut over ranks, which gives the logits of the next token alone.

Legend: B rows, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.device import compute_device
from hybridtron.evaluate.length import fitting_chunk
from hybridtron.evaluate.served import Served
from hybridtron.model.generate import Prompts
from hybridtron.model.lm import LanguageModel

Scored = tuple[Sequence[int], int]  # tokens, and how many of the last ones are scored
Score = tuple[float, bool]  # sum of log q, and whether each is the likeliest


@torch.no_grad()
def scored_rows(model: Served, rows: Sequence[Scored]) -> list[Score]:
    """Of each row; every row has a token before those that are scored."""
    if (whole := model.read.model) is None:
        return _step_by_step(model, rows)
    return _in_chunks(whole, rows, fitting_chunk(model.config.model, len(rows)))


def _in_chunks(model: LanguageModel, rows: Sequence[Scored], chunk: int) -> list[Score]:
    """Padded on the right: what follows changes nothing before it."""
    device = compute_device()
    longest = max(len(tokens) for tokens, _ in rows)
    tokens_BT = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in rows], device=device)
    states, found = None, []
    for start in range(0, longest - 1, chunk):
        tokens_BC = tokens_BT[:, start : min(start + chunk, longest - 1)]
        out = model(tokens_BC, states, SeqInfo.stream(len(rows), tokens_BC.shape[1], start, device))
        states = out.states
        found.append(_of_labels(out.output.transpose(0, 1), tokens_BT[:, start + 1 :][:, : tokens_BC.shape[1]]))
    log_q_BL, likeliest_BL = (torch.cat(part, dim=1).cpu() for part in zip(*found, strict=True))
    ends = [(row, len(tokens) - 1, scored) for row, (tokens, scored) in enumerate(rows)]
    return [
        (log_q_BL[row, end - scored : end].sum().item(), bool(likeliest_BL[row, end - scored : end].all()))
        for row, end, scored in ends
    ]


def _step_by_step(model: Served, rows: Sequence[Scored]) -> list[Score]:
    """The tokens that are scored are read one at a time, as a model that writes them would."""
    device = compute_device()
    contexts = [list(tokens[: len(tokens) - scored]) for tokens, scored in rows]
    prompts = Prompts.of(contexts, device)
    most = max(scored for _, scored in rows)
    labels_BS = torch.tensor([[*tokens[len(tokens) - n :], *[0] * (most - n)] for tokens, n in rows], device=device)
    logits_BV, states = prompts.read(model.read.read, fitting_chunk(model.config.model, len(rows)))
    following = model.read.steps(states, torch.tensor([len(one) for one in contexts], device=device))
    found = []
    for step in range(most):
        found.append(_of_labels(logits_BV[:, None], labels_BS[:, step : step + 1]))
        if step < most - 1:
            logits_BV = following(labels_BS[:, step])
    log_q_BS, likeliest_BS = (torch.cat(part, dim=1).cpu() for part in zip(*found, strict=True))
    return [
        (log_q_BS[row, :scored].sum().item(), bool(likeliest_BS[row, :scored].all()))
        for row, (_, scored) in enumerate(rows)
    ]


def _of_labels(logits_BCV: Tensor, labels_BC: Tensor) -> tuple[Tensor, Tensor]:
    """log q of each label, in fp32, and whether it is the likeliest token."""
    log_q_BCV = torch.log_softmax(logits_BCV.float(), dim=-1)
    return log_q_BCV.gather(-1, labels_BC[..., None])[..., 0].double(), logits_BCV.argmax(-1) == labels_BC
