"""Parts of the proofs in llama_cpp/ and vllm/: texts, arguments, and the runs and exports of families.

A family is a name with the settings of its run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.arguments import checkpoints_at
from hybridtron.cli.main import main as hybridtron
from hybridtron.data.tokenizer_file import read_tokenizer
from hybridtron.interop.verify import whole_model

NEW_TOKENS = 64
SHORT = ("run.max_steps=60", "run.eval_every=60", "checkpoint.every=60", "run.sample_tokens=0")
MAMBA2 = "model.layers.M={kind: mamba2, state: 32, head_dim: 32, groups: 2}"
TEXTS = (
    "The ",
    "import os",
    "def main(arguments: list[str]) -> int:\n    ",
    "In 1984 there were 12345 of them, weren't there?",
    "class Reader:\n    '''Reads\ttabs, and  spaces.'''\n\n    def __init__(self):",
    "Ein Satz mit Umlauten: äöü, 数字 and 🚀.",
    "for number in range(100):\n    print(number)\n" * 4,
    "The module provides a function that returns the value of the given argument. " * 6,
)


def parse(program: str, needs: str, families: Mapping[str, Any]) -> argparse.Namespace:
    """Parse the arguments of a proof: `folder`, `python`, and the names of families in `only`.

    program: the program that this package is compared with
    needs: what the other environment must have
    """
    parser = argparse.ArgumentParser(description=f"Compare {program} with this package.")
    parser.add_argument("folder", type=Path, help="folder for runs and exports")
    parser.add_argument("--python", required=True, help=f"interpreter of an environment with {needs}")
    parser.add_argument("--only", action="append", choices=list(families), help="this family; may be repeated")
    chosen = parser.parse_args()
    chosen.folder = chosen.folder.resolve()
    chosen.only = chosen.only or list(families)
    return chosen


def trained_and_exported(name: str, settings: Sequence[str], folder: Path, *options: str) -> tuple[Path, Path]:
    """Train and export a family, unless its folders exist. Returns the folders of the run and of the export."""
    run = folder / "runs" / name
    export = folder / f"{name}-hf"
    if not (run / "checkpoints").is_dir():
        require(["train", *settings, f"run.name={name}", f"run.dir={run}", *SHORT])
    if not export.exists():
        require(["export", str(run), "--output", str(export), *options])
    return run, export


def model_of(run: Path) -> Any:
    """Return the model of a run's newest checkpoint in fp32."""
    return whole_model(Checkpoint.open(checkpoints_at(run)[-1])).float().eval()


def tokenizer_of(export: Path) -> Tokenizer:
    """Return the tokenizer of an export."""
    return read_tokenizer((export / "tokenizer.json").read_bytes())


def require(arguments: list[str]) -> None:
    """Run a command of hybridtron. Ends the program if it fails."""
    if (code := hybridtron(arguments)) != 0:
        sys.exit(code)
