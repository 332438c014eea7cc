"""Text from a model: read the prompt once, then one token at a time from the carried states."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.model.lm import LanguageModel


@torch.no_grad()
def generate(model: LanguageModel, prompt_BL: Tensor, new_tokens: int, temperature: float, seed: int) -> Tensor:
    """Continue each row by `new_tokens` tokens; temperature 0 takes the likeliest one. Returns the new tokens."""
    generator = torch.Generator(prompt_BL.device).manual_seed(seed)
    tokens_BL, states, position = prompt_BL, None, 0
    made = []
    for _ in range(new_tokens):
        batch, length = tokens_BL.shape
        seq = SeqInfo.stream(batch, length, start=position, device=tokens_BL.device)
        logits_LBV, states, _ = model(tokens_BL, states, seq)
        position += length
        tokens_BL = _choose(logits_LBV[-1].float(), temperature, generator)
        made.append(tokens_BL)
    return torch.cat(made, dim=1)


def _choose(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits_BV / temperature, dim=-1), 1, generator=generator)
