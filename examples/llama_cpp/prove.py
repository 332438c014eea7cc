"""Compares llama.cpp with this package: trains a small model of each family, writes its GGUF file, and runs both.

    python -m venv LLAMA && LLAMA/bin/pip install llama-cpp-python     compiles llama.cpp
    python examples/llama_cpp/prove.py FOLDER --python LLAMA/bin/python

llama-cpp-python is a source distribution, so it has an environment of its own and is no part of the tests. Each family
gets texts of unequal length. Token ids of the texts, and 64 greedy tokens after each of them, must be equal; the
largest difference of logits after a text is printed. Then a tokenizer is trained with each pre-tokenizer, and ids of
the texts are compared. A family whose run is in FOLDER already is not trained again.

On two cores that other work shared, compiling libllama took 30 minutes, and a family two to four minutes. The proof was
run with this library as soon as it was there. pip then compiles further parts, which the proof does not need: over 45
minutes more.

Exit codes: 0 all tokens are equal, 1 some differ.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also where none is installed

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from examples.serving_proof import (
    MAMBA2,
    NEW_TOKENS,
    TEXTS,
    model_of,
    parse,
    require,
    tokenizer_of,
    trained_and_exported,
)
from hybridtron.data.batch import SeqInfo
from hybridtron.data.pre_tokenizers import PATTERNS, pre_tokenizer
from hybridtron.inference.generate import generate

OTHER_SIDE = Path(__file__).with_name("greedy.py")
GRANITE = (
    "recipe=laptop",
    "model.width=128",
    "model.pattern=(M-)*2 A- M-",
    MAMBA2,
    "model.layers.-={kind: swiglu, hidden: 256}",
    "model.embedding_multiplier=6",
    "model.residual_multiplier=0.5",
    "model.logits_scaling=4",
    "phases.0.lr=1e-3",
)
ATTENTION = "kind: attention, heads: 4, kv_heads: 2, scale: 0.1"
FAMILIES: dict[str, tuple[str, ...]] = {
    "mamba": ("recipe=laptop", "model.width=128", "model.pattern=M*4"),
    "mamba2": ("recipe=laptop", "model.width=128", "model.pattern=M*4", MAMBA2),
    "mamba2_wide": (
        "recipe=laptop",
        "model.width=64",
        "model.pattern=M*2",
        "model.layers.M={kind: mamba2, expand: 4, state: 16, head_dim: 32}",
    ),
    "granite_rope": (*GRANITE, f"model.layers.A={{{ATTENTION}}}"),
    "granite_nope": (*GRANITE, f"model.layers.A={{{ATTENTION}, rope: none}}"),
    "falcon_h1": ("recipe=falcon_h1_laptop",),
    "falcon_h1_norm": ("recipe=falcon_h1_laptop", "model.layers.M.norm=true", "model.layers.M.groups=2"),
}
"""Name of a run -> its settings."""


def main() -> int:
    """Prove every family. Returns the exit code."""
    chosen = parse("llama.cpp", "llama-cpp-python", FAMILIES)
    equal = [prove(name, chosen.folder, chosen.python) for name in chosen.only]
    equal += [prove_tokenizer(name, chosen.folder, chosen.python) for name in PATTERNS]
    return 0 if all(equal) else 1


def prove(name: str, folder: Path, python: str) -> bool:
    """Compare a family's model in both programs. Returns True if all tokens are equal."""
    run, export = trained_and_exported(name, FAMILIES[name], folder, "--target", "native")
    file = folder / f"{name}.gguf"
    file.unlink(missing_ok=True)
    require(["gguf", str(export), "--output", str(file)])
    theirs = answers_of(file, python, TEXTS, NEW_TOKENS)
    tokenizer = tokenizer_of(export)
    model = model_of(run)
    num_equal = 0
    largest = 0.0
    for text, answer in zip(TEXTS, theirs, strict=True):
        ids = tokenizer.encode(text).ids
        prompt_BL = torch.tensor([ids])
        logits_V = last_logits(model, prompt_BL)
        their_logits_V = torch.tensor(answer["logits"])
        largest = max(largest, float((logits_V - their_logits_V).abs().max() / logits_V.abs().max()))
        same = ids == answer["prompt"] and generate(model, prompt_BL, NEW_TOKENS, 0, 0)[0].tolist() == answer["tokens"]
        num_equal += same
        if not same:
            print(f"{name}: differs after {text!r}")
    lengths = f"{min(len(a['prompt']) for a in theirs)} to {max(len(a['prompt']) for a in theirs)} tokens"
    print(
        f"{name}: {num_equal} of {len(TEXTS)} texts of {lengths} have equal ids and {NEW_TOKENS} equal greedy tokens; "
        f"logits differ by at most {largest:.1e} of the largest"
    )
    return num_equal == len(TEXTS)


def prove_tokenizer(splits_by: str, folder: Path, python: str) -> bool:
    """Compare ids of texts for a tokenizer that is trained with a pre-tokenizer. Returns True if all are equal."""
    export = folder / f"{splits_by}-hf"
    file = folder / f"{splits_by}.gguf"
    shutil.rmtree(export, ignore_errors=True)
    shutil.copytree(next(folder.glob("*-hf")), export)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(splits_by)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(
        [Path(json.__file__).read_text(), Path(argparse.__file__).read_text(), *TEXTS], trainer
    )
    tokenizer.save(str(export / "tokenizer.json"))
    file.unlink(missing_ok=True)
    require(["gguf", str(export), "--output", str(file)])
    texts = [*TEXTS, Path(shutil.__file__).read_text()[:2000]]
    theirs = [answer["prompt"] for answer in answers_of(file, python, texts, new_tokens=1)]
    num_equal = sum(tokenizer.encode(text).ids == ids for text, ids in zip(texts, theirs, strict=True))
    print(f"{splits_by}: {num_equal} of {len(texts)} texts have equal ids")
    return num_equal == len(texts)


@torch.no_grad()
def last_logits(model: Any, prompt_BL: Tensor) -> Tensor:
    """Return the logits of the token after a prompt."""
    batch, length = prompt_BL.shape
    return model(prompt_BL, None, SeqInfo.stream(batch, length)).output[-1, 0].float()


def answers_of(file: Path, python: str, texts: Sequence[str], new_tokens: int) -> list[dict[str, Any]]:
    """Run llama.cpp on the texts: ids of each text, logits after it, and greedy tokens."""
    wanted = json.dumps({"model": str(file), "texts": texts, "new_tokens": new_tokens})
    done = subprocess.run([python, str(OTHER_SIDE)], input=wanted, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{python} {OTHER_SIDE} failed:\n{done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
