"""A piece of text from a checkpoint's model, for a person to read."""

from __future__ import annotations

from pathlib import Path

from hybridtron.config.schema import RunConfig
from hybridtron.config.units import readable
from hybridtron.data.tokenizer_file import read_tokenizer
from hybridtron.model.generate import Prompts, continued, reader
from hybridtron.model.lm import LanguageModel
from hybridtron.model.sampling import Sampling
from hybridtron.model.text import TextOfRow, write


def sample_text(
    model: LanguageModel, checkpoint: Path, prompt: str, new_tokens: int, temperature: float = 0.8, seed: int = 0
) -> str:
    """The prompt and what the model makes of it, with the tokenizer that the checkpoint holds."""
    tokenizer = read_tokenizer((checkpoint / "tokenizer.json").read_bytes())
    ids = tokenizer.encode(prompt).ids
    text = TextOfRow(tokenizer.decode, new_tokens, before=ids)
    prompts = Prompts.of([ids], next(model.parameters()).device)
    write([text], continued(reader(model), prompts, Sampling(temperature, seed=seed)), lambda row, new: None)
    return tokenizer.decode(ids) + text.text


def sample_report(model: LanguageModel, checkpoint: Path, run: RunConfig, tokens: int) -> str:
    """The sample that a run ends with; of a model that has read fewer tokens than it has weights noise is expected."""
    text = sample_text(model, checkpoint, run.sample_prompt, run.sample_tokens)
    parameters = sum(weight.numel() for weight in model.parameters())
    note = ""
    if tokens < parameters:
        note = f" (noise is expected: {readable(tokens)} tokens were read, {tokens / parameters:.2g} for each weight)"
    return f"\na sample of {run.sample_tokens} tokens after {run.sample_prompt!r}{note}:\n{text}"
