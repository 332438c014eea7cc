"""A piece of text from a checkpoint's model, for a person to read."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from hybridtron.model.generate import generate
from hybridtron.model.lm import LanguageModel


def sample_text(
    model: LanguageModel, checkpoint: Path, prompt: str, new_tokens: int, temperature: float = 0.8, seed: int = 0
) -> str:
    """The prompt and what the model makes of it, with the tokenizer that the checkpoint holds."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    device = next(model.parameters()).device
    prompt_BL = torch.tensor([tokenizer.encode(prompt).ids], device=device)
    made_BL = generate(model, prompt_BL, new_tokens, temperature, seed)
    return tokenizer.decode(prompt_BL[0].tolist() + made_BL[0].tolist())
