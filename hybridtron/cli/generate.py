"""Text from a checkpoint, with the tokenizer that it holds.

    hybridtron generate runs/laptop --prompt "def main(" --tokens 200
    hybridtron generate runs/laptop/checkpoints/step-00000245 --temperature 0

A run's folder stands for its newest checkpoint. Without a prompt the text begins where a document does. The prompt is
read once; every further token costs the same from then on where the model has no full attention. Exit codes: 0 text
was made, 2 there is no usable checkpoint or an argument is wrong.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtron.cli.given import newest_checkpoint, positive
from hybridtron.problems import ConfigError, Unusable

if TYPE_CHECKING:
    from hybridtron.config.schema import Config
    from hybridtron.model.lm import LanguageModel

DOCUMENT_STARTS = ("<|endoftext|>", "<|begin_of_text|>", "<s>", "<|end_of_text|>", "</s>", "<bos>", "<eos>", "[BOS]")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; wrong values end the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="hybridtron generate", description="Text from a checkpoint, or from the newest one of a run's folder."
    )
    parser.add_argument("path", type=Path, help="runs/NAME, or runs/NAME/checkpoints/step-00000100")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what to continue (default: a document's start)")
    parser.add_argument("--tokens", type=positive, default=100, metavar="N", help="new tokens (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, another text")
    chosen = parser.parse_args(arguments)
    if not (math.isfinite(chosen.temperature) and chosen.temperature >= 0):
        parser.error(f"--temperature is {chosen.temperature}, must be 0 (always the likeliest token) or above")
    if not 0 <= chosen.seed < 2**63:
        parser.error(f"--seed is {chosen.seed}, must be 0 or above, and below 2^63")
    return chosen


def main(arguments: list[str]) -> int:
    """Print the prompt and what follows. Returns the exit code."""
    chosen = parse(arguments)
    checkpoint = newest_checkpoint(chosen.path)
    print(text(checkpoint, chosen.prompt, chosen.tokens, chosen.temperature, chosen.seed))
    return 0


def text(checkpoint: Path, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """Load the model of a checkpoint, and let it write."""
    from hybridtron.train.sample import sample_text

    model, _, _ = load_checkpoint(checkpoint)
    prompt = prompt_or_start(checkpoint, prompt)
    return sample_text(model, checkpoint, prompt, tokens, temperature, seed)


def load_checkpoint(checkpoint: Path) -> tuple[LanguageModel, Config, int]:
    """The whole model, as the checkpoint's configuration describes it, that configuration, and the step."""
    from hybridtron.checkpoint.checkpoint import Checkpoint
    from hybridtron.checkpoint.manifest import BrokenCheckpoint
    from hybridtron.device import DTYPES, compute_device
    from hybridtron.model.lm import LanguageModel

    try:
        found = Checkpoint.open(checkpoint)
        config = found.config
        model = LanguageModel(config.model).to(compute_device()).cast(DTYPES[config.precision.name])
        found.load_weights(model)
    except BrokenCheckpoint as error:
        raise Unusable(str(error)) from error
    except ConfigError as error:
        raise Unusable(f"{checkpoint} has a config.yaml that this version can't read.\n{error}") from error
    return model, config, found.meta.step


def prompt_or_start(checkpoint: Path, prompt: str) -> str:
    """The prompt, or the token of the checkpoint's vocabulary that stands between documents."""
    from tokenizers import Tokenizer

    path = checkpoint / "tokenizer.json"
    if not path.exists():
        raise Unusable(f"{checkpoint} has no tokenizer.json: it is incomplete")
    try:
        vocabulary = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(vocabulary)
    except Exception as error:  # the package raises nothing more specific
        raise Unusable(f"{path} can't be read: {error}") from error
    if prompt:
        if not tokenizer.encode(prompt).ids:
            raise Unusable(f"--prompt {prompt!r} has no token in the vocabulary of {path}")
        return prompt
    for name in DOCUMENT_STARTS:
        if tokenizer.token_to_id(name) is not None:
            return name
    looked_for = ", ".join(DOCUMENT_STARTS)
    raise Unusable(f"{path} names no token that starts a document (looked for {looked_for}): use --prompt")
