"""Bugs of weights that places share, and of the embedding that goes from stage to stage, to try the audit with."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.model.lm import LanguageModel, ModelOut
from hybridtron.model.stack import States
from hybridtron.proving.audit.bug import Bug, Replaced, marked

SHARED_GRADIENT: Replaced = {
    "hybridtron.engine.shared_gradients.SharedGradients.sum_over_stages": lambda *_: None,
}
_forward = LanguageModel.forward


def _cut_off(
    model: LanguageModel,
    tokens_BL: Tensor,
    states: States | None,
    seq: SeqInfo,
    x_LBD: Tensor | None = None,
    logits: bool = True,
) -> ModelOut:
    if x_LBD is not None:
        stream_LBD, embedded_LBD = x_LBD.chunk(2)
        x_LBD = torch.cat((stream_LBD, embedded_LBD.detach()))
    return _forward(model, tokens_BL, states, seq, x_LBD, logits)


LOST_EMBEDDING: Replaced = {"hybridtron.model.lm.LanguageModel.forward": _cut_off}


def _stream_twice(
    model: LanguageModel,
    tokens_BL: Tensor,
    states: States | None,
    seq: SeqInfo,
    x_LBD: Tensor | None = None,
    logits: bool = True,
) -> ModelOut:
    x_LBD = None if x_LBD is None else torch.cat((x_LBD.chunk(2)[0],) * 2)
    return _forward(model, tokens_BL, states, seq, x_LBD, logits)


STREAM_TWICE: Replaced = {"hybridtron.model.lm.LanguageModel.forward": _stream_twice}
COPIES_COUNT: Replaced = marked("shared.", "shared", False)
PAIR_GRADIENT: Replaced = marked("_A.weight", "partial_over_tensor", False)

SHARING_BUGS = {
    "shared_gradient": Bug("stages keep the gradient of their own places", SHARED_GRADIENT, "zamba2", "pp2"),
    "lost_embedding": Bug("the embedding's gradient ends at a stage border", LOST_EMBEDDING, "zamba2", "pp2"),
    "stream_twice": Bug("a stage takes the stream for the embedding", STREAM_TWICE, "zamba2", "pp2"),
    "copies_count": Bug("the gradient norm counts a shared weight on every stage", COPIES_COUNT, "zamba2", "pp2"),
    "pair_gradient": Bug("a low-rank pair keeps its rank's part", PAIR_GRADIENT, "zamba2", "tp2"),
}
