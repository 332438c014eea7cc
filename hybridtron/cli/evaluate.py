"""How a checkpoint reads text that is longer than what it was trained on: the instruments of length generalization.

    hybridtron evaluate runs/laptop
    hybridtron evaluate runs/samba/checkpoints/step-00000500 --data /data/pg19 --length 65536 --rows 16

Reads held-out documents that are long enough, where there are any; else the validation split packed end to end, and
says which. Writes into RUN/evaluation/STEP, or --output:

    positions.jsonl, .png     loss and perplexity of the prediction after `position` tokens
    remembrance.jsonl, .png   how far the next token's distribution moves when the first `t` tokens are not shown
    states.jsonl, .png        standard deviation of every layer's recurrent state, by head where it has heads

They are defined in hybridtron/train/length_evaluation.py. Every line says by letter which `attention` was used, not
always that of training: full, or a window or span of N tokens. Exit codes: 0 all was written, 2 no checkpoint, too
little text, or a wrong argument.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hybridtron.cli.evaluate_pictures import Lines, draw
from hybridtron.cli.given import newest_checkpoint, positive, progress_bar
from hybridtron.evaluate.served import opened, whole_model
from hybridtron.problems import Unusable
from hybridtron.requirements import is_there, missing

if TYPE_CHECKING:
    from torch import Tensor

    from hybridtron.config.schema import Config, DataConfig
    from hybridtron.data.mds.store import DocumentStore
    from hybridtron.data.order.stream import RowSpans
    from hybridtron.data.sources import Sources
    from hybridtron.model.lm import LanguageModel

INSTRUMENTS = ("positions", "remembrance", "states")
STATE_POSITIONS = 64  # at which the states are looked at


@dataclass(frozen=True)
class Text:
    """What is read: rows of length + 1 tokens (B, T), what they are in words, and the model's training length."""

    tokens_BT: Tensor
    described: str
    length: int
    seq_len: int


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; wrong values end the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="hybridtron evaluate", description="Length generalization of a checkpoint, measured on held-out text."
    )
    parser.add_argument("path", type=Path, help="runs/NAME, or runs/NAME/checkpoints/step-00000100")
    parser.add_argument("--data", metavar="PATH", help="prepared tokens, here or at a URL (default: those of the run)")
    parser.add_argument(
        "--length", default="16x", metavar="N", help="tokens, or training lengths (default: %(default)s)"
    )
    parser.add_argument(
        "--seq-len", type=positive, metavar="N", help="training length (default: as the checkpoint says)"
    )
    parser.add_argument("--rows", type=positive, default=8, metavar="B", help="rows, at most (default: %(default)s)")
    parser.add_argument("--instruments", default=",".join(INSTRUMENTS), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: RUN/evaluation/STEP)")
    chosen = parser.parse_args(arguments)
    chosen.instruments = chosen.instruments.split(",")
    if wrong := [name for name in chosen.instruments if name not in INSTRUMENTS]:
        parser.error(f"--instruments: there is no {wrong[0]!r}; there are {', '.join(INSTRUMENTS)}")
    if not re.fullmatch(r"0*[1-9]\d*x?", chosen.length, re.ASCII):
        parser.error(f"--length is {chosen.length}, must be a number of tokens such as 8192, or of lengths such as 16x")
    return chosen


def main(arguments: list[str]) -> int:
    """Measure, write and print. Returns the exit code."""
    chosen = parse(arguments)
    try:
        evaluate(chosen)
    except OSError as error:
        raise Unusable(str(error)) from error
    return 0


def evaluate(chosen: argparse.Namespace) -> None:
    """All that the command line asks for; Unusable where that can't be had."""
    checkpoint = newest_checkpoint(chosen.path)
    from hybridtron.train.length_evaluation import (  # torch, which a wrong path does without
        attention_at_eval,
        fitting_chunk,
    )

    model, config, seq_len = load(checkpoint, chosen.seq_len)
    length = int(chosen.length.removesuffix("x")) * (seq_len if chosen.length.endswith("x") else 1)
    text = read_text(checkpoint, config.data, seq_len, chosen.data, length, chosen.rows)
    piece, attention = fitting_chunk(config.model, len(text.tokens_BT)), attention_at_eval(config.model)
    run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    output = chosen.output or run / "evaluation" / checkpoint.name
    output.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{checkpoint}, trained on rows of {seq_len} tokens\n{text.described}")
    if attention:
        console.print("attention: " + ", ".join(f"{kind} ({letter})" for letter, kind in attention.items()))
    pictures = is_there("matplotlib")
    for name in dict.fromkeys(chosen.instruments):
        lines, table = {"positions": positions, "remembrance": remembrance, "states": states}[name](model, text, piece)
        if not lines:
            console.print(f"{name}: nothing to measure, the model has no layer with a recurrent state")
            continue
        written = (json.dumps({**line, "attention": attention}) + "\n" for line in lines)
        (output / f"{name}.jsonl").write_text("".join(written))
        console.print(table)
        if pictures:
            draw(name, lines, text.seq_len, output / f"{name}.png")
    console.print(f"written to {output}" + ("" if pictures else f", without pictures: {missing('plot')}"))


def load(checkpoint: Path, seq_len: int | None) -> tuple[LanguageModel, Config, int]:
    """The whole model; the configuration, with the data of the phase that it was written in; the length of its rows."""
    from hybridtron.config.resolve import resolve

    found, config = opened(checkpoint)
    model, step = whole_model(found, config), found.meta.step
    if phases := resolve(config):
        phase = next((one for one in phases if step <= one.end_step), phases[-1])
        return model, replace(config, data=phase.data), seq_len or phase.settings.seq_len
    if seq_len is None:
        raise Unusable(f"{checkpoint} was imported and does not say how it was trained: give --seq-len, and --data")
    return model, config, seq_len


def read_text(checkpoint: Path, data: DataConfig, seq_len: int, path: str | None, length: int, rows: int) -> Text:
    """Rows of held-out text: documents from their start, or the split packed end to end where none is long enough."""
    import torch

    from hybridtron.data.folder import FolderError
    from hybridtron.data.mds.store import DataError
    from hybridtron.data.rows import gather
    from hybridtron.storage.digest import digest_of

    try:
        sources = open_sources(data, path)
        tokenizer = digest_of((checkpoint / "tokenizer.json").read_bytes())
        if other := [one.folder for one in sources.mixture if one.folder.manifest.tokenizer != tokenizer]:
            raise FolderError(other[0].name, f"was made with another tokenizer than {checkpoint} holds")
        stores = sources.stores("validation")
        chosen, described = choose_rows(stores, length, rows)
        tokens_BT = gather(stores, chosen, sources.dtype, joined=True).tokens_BT
    except (FolderError, DataError) as error:
        raise Unusable(f"{error}; --data names other prepared tokens") from error
    return Text(torch.from_numpy(tokens_BT.astype("int64")), described, length, seq_len)


def open_sources(data: DataConfig, path: str | None) -> Sources:
    """What the run read, or all that a folder holds out."""
    from hybridtron.data.mds.opening import open_folder
    from hybridtron.data.mixture_spec import MixtureSource, mixture_of
    from hybridtron.data.sources import Sources, cache_options

    cache = cache_options(data)
    if path is None:
        return Sources(mixture_of(data, lambda name: open_folder(name, cache)), cache)
    folder = open_folder(path, cache)
    held_out = folder.manifest.splits["validation"].items()
    return Sources([MixtureSource(name, folder, name, float(one.tokens)) for name, one in held_out], cache)


def choose_rows(stores: Sequence[DocumentStore], length: int, rows: int) -> tuple[list[RowSpans], str]:
    """At most this number of rows of length + 1 tokens, from the sources in turn, and what they are."""
    import numpy as np

    from hybridtron.data.order.stream import DocumentStream, RowSpans, Span

    long = [np.flatnonzero(store.lengths > length)[:rows].tolist() for store in stores]
    found = [[[Span(document, 0, length + 1)] for document in of_source] for of_source in long]
    kind = f"long documents of the validation split, the first {length} tokens of each"
    if not any(found):
        kind = f"rows of {length} tokens, from the validation split packed end to end: none of its documents is as long"
        streams = [DocumentStream(store) for store in stores]
        starts = range(0, rows * (length + 1), length + 1)
        found = [[one.spans(at, length + 1) for at in starts if at + length < one.tokens_per_epoch] for one in streams]
    turns = itertools.chain.from_iterable(map(enumerate, itertools.zip_longest(*found)))
    chosen = [RowSpans([(source, span) for span in spans], 0) for source, spans in turns if spans is not None][:rows]
    if not chosen:
        most = max((int(store.shard_tokens.sum()) for store in stores), default=0)
        raise Unusable(f"a row takes {length + 1} tokens, no source holds out more than {most}: take fewer by --length")
    return chosen, f"{len(chosen)} {kind}" + (f" ({rows} were asked for)" if len(chosen) < rows else "")


def positions(model: LanguageModel, text: Text, piece: int) -> tuple[Lines, Table]:
    """Loss and perplexity by position; in the table by doublings of the training length."""
    from hybridtron.train.length_evaluation import perplexity_bins, position_losses

    with advancing("positions", text.length) as advance:
        losses_L = position_losses(model, text.tokens_BT, piece, advance)
    columns = enumerate(zip(losses_L.tolist(), losses_L.exp().tolist(), strict=True), start=1)
    lines = [{"position": position, "loss": loss, "perplexity": ppl} for position, (loss, ppl) in columns]
    table = Table("tokens before", "of the training length", "perplexity", box=None)
    for first, last, perplexity in perplexity_bins(losses_L, text.seq_len):
        table.add_row(f"{first} to {last}", f"to {last / text.seq_len:.3g}x", f"{perplexity:.4g}")
    return lines, table


def remembrance(model: LanguageModel, text: Text, piece: int) -> tuple[Lines, Table]:
    """Effective Remembrance from the far past to the last token."""
    from hybridtron.train.length_evaluation import effective_remembrance, remembrance_points

    ts = remembrance_points(text.length)
    with advancing("remembrance", text.length + sum(text.length - t for t in ts if t)) as advance:
        measured = effective_remembrance(model, text.tokens_BT[:, :-1], ts, piece, advance)
    table = Table("tokens not shown", "shown", "total variation", "Jensen-Shannon", "cosine distance", box=None)
    for t, *moved in measured:
        table.add_row(str(t), str(text.length - t), *(f"{value:.3g}" for value in moved))
    return [{"length": text.length, **one._asdict()} for one in measured], table


def states(model: LanguageModel, text: Text, piece: int) -> tuple[Lines, Table]:
    """Deviations of the states; in the table at the end against the training length."""
    from hybridtron.train.length_evaluation import state_deviation

    with advancing("states", text.length) as advance:
        every = max(1, text.length // STATE_POSITIONS)
        measured = state_deviation(model, text.tokens_BT[:, :-1], every, piece, advance)
    table = Table("layer", "position", "deviation", "position", "deviation", "grows by", "most in a head", box=None)
    for layer in dict.fromkeys(one.layer for one in measured):
        of_layer = [one for one in measured if one.layer == layer]
        before, after = min(of_layer, key=lambda one: abs(one.position - text.seq_len)), of_layer[-1]
        heads = [late / max(early, 1e-30) for early, late in zip(before.deviations, after.deviations, strict=True)]
        at = [str(value) for one in (before, after) for value in (one.position, f"{one.overall:.4g}")]
        grown = after.overall / max(before.overall, 1e-30)
        table.add_row(str(layer), *at, f"x {grown:.3g}", f"x {max(heads):.3g}" if len(heads) > 1 else "no heads")
    return [{**one._asdict(), "overall": one.overall} for one in measured], table


@contextmanager
def advancing(what: str, tokens: int) -> Iterator[Callable[[int], None]]:
    """A bar over the tokens of a row, moved by the number just read."""
    with progress_bar(what) as moved:
        read = 0

        def advance(more: int) -> None:
            nonlocal read
            read += more
            moved(read, tokens)

        yield advance
