"""Replay a refused step on one process: forward and backward passes with the batch that the run has stored.

    hybridtron replay runs/laptop                              the newest refused step
    hybridtron replay runs/laptop --list                       list all steps whose batches are stored
    hybridtron replay runs/laptop --batch phase-0-batch-00000121
    hybridtron replay runs/laptop --text                       also print the rows as text

A run refuses a step if its loss or gradient norm is not finite, or if the norm is far above the usual norm. The run
then leaves the weights unchanged, and stores the batch. The replay uses the weights from the newest checkpoint before
the step. It computes the step twice: with the op implementations that the run uses, and with the reference
implementation of every op. It prints the losses and gradient norms of both computations:

- Both gradient norms are large or not finite: the fault is in the data or in the weights.
- Only the gradient norm from the run's implementations is large or not finite: the fault is in an implementation of an
  op. To find the op, train with other values of `run.force_ops`.

Exit codes: 0 replayed, 2 no such batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hybridtron.limits import path_of
from hybridtron.problems import CommandParser, Unusable, did_you_mean

if TYPE_CHECKING:
    from hybridtron.train.replay import Replay, Replayed

REFERENCE = {"*": "reference"}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(prog="hybridtron replay", description="Repeat a refused step on one process.")
    parser.add_argument("run", type=path_of, help="the run's folder")
    parser.add_argument("--list", action="store_true", help="list the refused steps whose batches are stored")
    parser.add_argument("--batch", metavar="NAME", help="a folder in RUN/refused; default: the newest refused step")
    parser.add_argument("--text", action="store_true", help="print the batch's rows as text")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Replay a step and print its losses and gradient norms. Returns the exit code.

    Raises Unusable if the run or the batch is missing.
    """
    chosen = parse(arguments)
    if not (chosen.run / "config.yaml").is_file():
        raise Unusable(f"{chosen.run} has no config.yaml: name the folder of a run", code="no-file")
    from hybridtron.train import refused  # imports torch, which --help does without
    from hybridtron.train.jsonl import read_record

    kept = {folder.name: folder for folder in refused.kept_batches(chosen.run)}
    if not kept:
        reason = "the run has refused no step, or run.keep_refused is 0"
        raise Unusable(f"{chosen.run} has no stored batch: {reason}", code="no-file")
    if chosen.list:
        for name, folder in kept.items():
            about = read_record(folder / refused.ABOUT)
            print(f"{name}  step {about['step']}: {about['why']}")
        return 0
    name = chosen.batch or list(kept)[-1]
    if name not in kept:
        near = did_you_mean(name, kept)
        raise Unusable(
            f"--batch {name} is not in {chosen.run}/refused{near}: use a name that --list prints", code="unknown-name"
        )
    from hybridtron.train.replay import replay_of

    with replay_of(chosen.run, kept[name]) as replay:
        print(f"{name}: step {replay.refused.step} was refused, since {replay.refused.why}")
        print(f"weights: {'the first weights of the run' if replay.checkpoint is None else replay.checkpoint.folder}")
        if chosen.text:
            print_rows(replay, chosen.run)
        compare(replay.run({}), replay.run(REFERENCE))
    return 0


def compare(usual: Replayed, reference: Replayed) -> None:
    """Print losses, gradient norms and each layer's gradient norm, for the run's ops and for the reference ops."""
    table = Table("", "ops of the run", "reference", box=None)
    table.add_row("loss", f"{usual.loss:.6g}", f"{reference.loss:.6g}")
    table.add_row("gradient norm", f"{usual.grad_norm:.6g}", f"{reference.grad_norm:.6g}")
    for layer, norm in usual.layers.items():
        table.add_row(layer, f"{norm:.6g}", f"{reference.layers[layer]:.6g}")
    Console(markup=False, highlight=False).print(table)


def print_rows(replay: Replay, run: Path) -> None:
    """Print each row of the batch as text, or as token ids if no checkpoint has a tokenizer."""
    from hybridtron.config.weights import tokenizer_of
    from hybridtron.data.tokenizer_file import read_tokenizer

    path = tokenizer_of(str(run))
    tokenizer = None if path is None else read_tokenizer(path.read_bytes())
    rows = [
        (tokens_L.tolist(), int(mask_L.sum()))
        for batch in replay.refused.batches
        for tokens_L, mask_L in zip(batch.tokens_BL, batch.mask_BL, strict=True)
    ]
    for number, (tokens, learned) in enumerate(rows):
        print(f"row {number}, {learned} of {len(tokens)} tokens count in the loss:")
        print(tokens if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False))
