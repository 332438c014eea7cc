"""Planted bugs of shared weights and the embedding that stages pass along, for testing the audit."""

from __future__ import annotations

from collections.abc import Callable

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
Received = tuple[Tensor, Tensor]
"""Stream and embedding, as received from the previous stage."""


def taken_as(changed: Callable[[Tensor, Tensor], Received]) -> Replaced:
    """Change the stream and the embedding that a stage receives."""

    def forward(
        model: LanguageModel,
        tokens_BL: Tensor,
        states: States | None,
        seq: SeqInfo,
        x_LBD: Tensor | None = None,
        logits: bool = True,
    ) -> ModelOut:
        if x_LBD is not None:
            x_LBD = torch.cat(changed(*x_LBD.chunk(2)))
        return _forward(model, tokens_BL, states, seq, x_LBD, logits)

    return {"hybridtron.model.lm.LanguageModel.forward": forward}


LOST_EMBEDDING = taken_as(lambda stream_LBD, embedded_LBD: (stream_LBD, embedded_LBD.detach()))
STREAM_TWICE = taken_as(lambda stream_LBD, _: (stream_LBD, stream_LBD))
COPIES_COUNT: Replaced = marked("shared.", "shared", False)
PAIR_GRADIENT: Replaced = marked("_A.weight", "partial_over_tensor", False)

SHARING_BUGS = {
    "shared_gradient": Bug("stages keep the gradient of their own places", SHARED_GRADIENT, "zamba2", "pp2"),
    "lost_embedding": Bug("the embedding's gradient ends at a stage border", LOST_EMBEDDING, "zamba2", "pp2"),
    "stream_twice": Bug("a stage takes the stream for the embedding", STREAM_TWICE, "zamba2", "pp2"),
    "copies_count": Bug("the gradient norm counts a shared weight on every stage", COPIES_COUNT, "zamba2", "pp2"),
    "pair_gradient": Bug("a low-rank pair keeps its rank's part", PAIR_GRADIENT, "zamba2", "tp2"),
}
