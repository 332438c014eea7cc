"""Held-out loss at the training length and at multiples of it, every row from zero states."""

from __future__ import annotations

import torch

from hybridtron.config.schema import Config, PhaseConfig
from hybridtron.config.units import parse_tokens
from hybridtron.data.folder import TokenFolder
from hybridtron.data.loader import held_out
from hybridtron.engine.schedule import batch_loss
from hybridtron.model.lm import LanguageModel


@torch.no_grad()
def evaluate(
    model: LanguageModel, folder: TokenFolder, config: Config, phase: PhaseConfig, device: torch.device
) -> dict[str, float]:
    """Mean cross entropy per token, by length: {"1x": 3.21, "2x": 3.18}."""
    return {
        f"{multiple}x": _mean_loss(model, folder, config, phase, multiple, device)
        for multiple in config.run.eval_lengths
    }


def _mean_loss(
    model: LanguageModel, folder: TokenFolder, config: Config, phase: PhaseConfig, multiple: int, device: torch.device
) -> float:
    documents = config.data_of(phase).documents
    rows = max(1, phase.micro_batch // multiple)
    total, tokens = torch.zeros((), device=device), torch.zeros((), device=device)
    for batch in held_out(folder, documents, phase.seq_len * multiple, parse_tokens(config.run.eval_tokens), rows):
        loss, _ = batch_loss(model, batch.to(device))
        total += loss.cross_entropy
        tokens += loss.tokens
    return (total / tokens).item()
