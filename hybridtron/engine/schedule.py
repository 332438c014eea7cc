"""One optimizer step's forward and backward passes over its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtron.data.batch import Batch
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.loss import Loss, cross_entropy


def forward_backward(model: LanguageModel, batches: Sequence[Batch], z_loss: float, device: torch.device) -> Tensor:
    """Add up the gradients of the mean loss over all tokens of all micro-batches; returns that mean cross entropy.

    The mean is over tokens, not over micro-batches: rows with more masked tokens weigh less.
    """
    tokens = sum(int(batch.mask_BL.sum()) for batch in batches)
    total = torch.zeros((), device=device)
    for batch in batches:
        loss, aux = batch_loss(model, batch.to(device), z_loss)
        objective = loss.total / max(tokens, 1)
        for extra in aux.values():
            objective = objective + extra / len(batches)
        objective.backward()
        total += loss.cross_entropy.detach()
    return total / max(tokens, 1)


def batch_loss(model: LanguageModel, batch: Batch, z_loss: float = 0.0) -> tuple[Loss, dict[str, Tensor]]:
    """The loss of one micro-batch whose rows start from zero states, and the mixers' auxiliary losses."""
    logits_LBV, _, aux = model(batch.tokens_BL, None, batch.seq)
    return cross_entropy(logits_LBV, batch.labels_BL.T, batch.mask_BL.T, z_loss), aux
