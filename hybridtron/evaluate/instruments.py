"""Instruments: measurements on held-out text that show how far a model generalizes beyond its training length.

    positions     loss and perplexity by position
    remembrance   Effective Remembrance: how much the next token's distribution depends on the first tokens
    states        standard deviation of the recurrent states by position
    entropy       entropies of attention weights and the scans' step sizes, by layer

An instrument writes its measurements as lines to a file NAME.jsonl. Its table is computed from these lines, without the
model. The measurements are implemented in `length.py` and `entropy.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hybridtron.architecture.table import Architecture
from hybridtron.evaluate.pictures import Lines, draw
from hybridtron.requirements import is_there
from hybridtron.train.jsonl import read_lines, write_whole

if TYPE_CHECKING:
    from hybridtron.evaluate.held_out import Text
    from hybridtron.inference.reader import Reader

STATE_POSITIONS = 64  # number of positions at which states are measured
TOLERANCE = 0.02  # fraction by which the context beyond the training length may raise perplexity
Moved = Callable[[int, int], object]
"""Progress callback. Its arguments are the number of a row's tokens read so far, and the total number to read."""


class InstrumentTable(NamedTuple):
    """A summary of an instrument's lines: title, column names, rows, and a sentence below the table."""

    title: str
    header: tuple[str, ...]
    cells: Sequence[Sequence[str]]
    note: str = ""


class Instrument(NamedTuple):
    """An instrument's two functions.

    measure: (model, text, tokens per chunk, progress callback) -> lines with the measurements
    table: (lines, training length) -> table that summarizes the lines
    """

    measure: Callable[[Reader, Text, int, Moved], Lines]
    table: Callable[[Lines, int], InstrumentTable]


def run_instrument(
    name: str, model: Reader, arch: Architecture, text: Text, first: bool, output: Path, moved: Moved
) -> bool:
    """Measure with an instrument, and write its lines, and a picture if matplotlib is installed.

    All ranks of the model call this together. Only the process with `first` writes. Returns False if the model has no
    layer that the instrument measures.
    """
    from hybridtron.evaluate.length import attention_at_eval, fitting_chunk

    chunk = fitting_chunk(arch, len(text.tokens_BT), model.context.size)
    attention = attention_at_eval(arch)
    lines = INSTRUMENTS[name].measure(model, text, chunk, moved)
    if first and lines:
        lines_of_json = (json.dumps({**line, "attention": attention}) + "\n" for line in lines)
        write_whole(output / f"{name}.jsonl", "".join(lines_of_json))
        if is_there("matplotlib"):
            draw(name, lines, text.seq_len, output / f"{name}.png")
    return bool(lines)


def table_of(name: str, folder: Path, seq_len: int) -> InstrumentTable:
    """Build an instrument's table from the lines in its file."""
    return INSTRUMENTS[name].table(read_lines(folder / f"{name}.jsonl"), seq_len)


def positions(model: Reader, text: Text, chunk: int, moved: Moved) -> Lines:
    """Measure the loss by position twice: with full context, and with context limited to the training length."""
    from hybridtron.evaluate.length import position_losses
    from hybridtron.evaluate.short_context import losses_within, short_rows

    tokens_again = sum(row.end - row.start for row in short_rows(text.length, text.seq_len))
    advanced = advance(moved, text.length + tokens_again)
    losses_L = position_losses(model, text.tokens_BT, chunk, advanced)
    within_L = losses_within(model, text.tokens_BT, text.seq_len, chunk, advanced)
    columns = zip(losses_L.tolist(), losses_L.exp().tolist(), within_L.tolist(), strict=True)
    return [
        {"position": position, "loss": loss, "perplexity": perplexity, "loss_within": within}
        for position, (loss, perplexity, within) in enumerate(columns, start=1)
    ]


def positions_table(lines: Lines, seq_len: int) -> InstrumentTable:
    """Show perplexity by position, in bins: up to the training length, and for each doubling beyond it.

    The note has the verdict on length generalization.
    """
    cells = [
        (
            f"{rise.first} to {rise.last}",
            f"to {rise.last / seq_len:.3g}x",
            f"{rise.perplexity:.4g}",
            f"{rise.within:.4g}",
        )
        for rise in rises(lines, seq_len)
    ]
    note = ""
    if decision := verdict(lines, seq_len):
        if decision.holds:
            claim = "generalizes to this length"
        else:
            claim = "does not generalize to this length"
        most = f"perplexity is at most {decision.most:.4g} times that with context limited to the training length"
        note = f"{claim}: {most} (tolerance {TOLERANCE:.0%})"
    header = ("tokens before", "of the training length", "perplexity", "with limited context")
    return InstrumentTable("positions: perplexity by the number of tokens before", header, cells, note)


class Rise(NamedTuple):
    """Perplexity over the tokens with `first` to `last` tokens before them in the row.

    perplexity: perplexity with all tokens before a token as its context
    within: perplexity with context limited to the training length
    """

    first: int
    last: int
    perplexity: float
    within: float


def rises(lines: Lines, seq_len: int) -> list[Rise]:
    """Compute perplexities from the lines of `positions`, for the training length and for each doubling beyond it."""
    import torch

    from hybridtron.evaluate.length import perplexity_bins

    losses_L, within_L = (
        torch.tensor([line[key] for line in lines], dtype=torch.float64) for key in ("loss", "loss_within")
    )
    bin_pairs = zip(perplexity_bins(losses_L, seq_len), perplexity_bins(within_L, seq_len), strict=True)
    return [Rise(*full_bin, within_bin.perplexity) for full_bin, within_bin in bin_pairs]


class Verdict(NamedTuple):
    """Verdict on length generalization.

    most: the largest ratio over all doublings beyond the training length. A ratio is perplexity with full context,
        divided by perplexity with context limited to the training length
    """

    most: float

    @property
    def holds(self) -> bool:
        """True if the ratio is within the tolerance."""
        return self.most <= 1 + TOLERANCE


def verdict(lines: Lines, seq_len: int) -> Verdict | None:
    """Compare perplexity beyond the training length with the same tokens' perplexity in limited context.

    Buitrago Ruiz & Gu (definition 3.2) compare the perplexities at different positions. Their comparison needs enough
    text, so that all positions have equally difficult tokens on average. The comparison here needs less text, since it
    uses the same tokens twice. Returns None if no position is beyond the training length.
    """
    if len(lines) > seq_len:
        beyond = rises(lines, seq_len)[1:]
    else:
        beyond = []
    if beyond:
        return Verdict(max(rise.perplexity / rise.within for rise in beyond))
    return None


def remembrance(model: Reader, text: Text, chunk: int, moved: Moved) -> Lines:
    """Measure Effective Remembrance: how the next token's distribution changes if the first t tokens are not read."""
    from hybridtron.evaluate.length import effective_remembrance, remembrance_points

    ts = remembrance_points(text.length)
    advanced = advance(moved, text.length + sum(text.length - t for t in ts if t))
    measured = effective_remembrance(model, text.tokens_BT[:, :-1], ts, chunk, advanced)
    return [{"length": text.length, **measurement._asdict()} for measurement in measured]


def remembrance_table(lines: Lines, seq_len: int) -> InstrumentTable:
    """Show the distances between the next token's distributions with and without the first t tokens, by t."""
    distances = ("total_variation", "jensen_shannon", "cosine")
    cells = [
        (str(line["t"]), str(line["length"] - line["t"]), *(f"{line[key]:.3g}" for key in distances)) for line in lines
    ]
    title = "remembrance: how far the next token's distribution moves when the first tokens are not shown"
    header = ("tokens not shown", "shown", "total variation", "Jensen-Shannon", "cosine distance")
    return InstrumentTable(title, header, cells)


def states(model: Reader, text: Text, chunk: int, moved: Moved) -> Lines:
    """Measure the standard deviation of each layer's recurrent state, at every 1/64 of the row's length."""
    from hybridtron.evaluate.length import state_deviation

    every = max(1, text.length // STATE_POSITIONS)
    measured = state_deviation(model, text.tokens_BT[:, :-1], every, chunk, advance(moved, text.length))
    return [{**deviation._asdict(), "overall": deviation.overall} for deviation in measured]


def states_table(lines: Lines, seq_len: int) -> InstrumentTable:
    """Compare each layer's deviation at the row's end with its deviation near the training length."""
    cells = []
    for layer in dict.fromkeys(line["layer"] for line in lines):
        layer_lines = [line for line in lines if line["layer"] == layer]
        near = min(layer_lines, key=lambda line: abs(line["position"] - seq_len))
        end = layer_lines[-1]
        deviation_pairs = zip(near["deviations"], end["deviations"], strict=True)
        growth_by_head = [late / max(early, 1e-30) for early, late in deviation_pairs]
        both_positions = [str(value) for line in (near, end) for value in (line["position"], f"{line['overall']:.4g}")]
        growth = f"x {end['overall'] / max(near['overall'], 1e-30):.3g}"
        cells.append(
            (str(layer), *both_positions, growth, f"x {max(growth_by_head):.3g}" if len(growth_by_head) > 1 else "-")
        )
    title = "states: standard deviation of each layer's recurrent state, near the training length and at the end"
    header = ("layer", "position", "deviation", "position", "deviation", "growth", "largest growth of a head")
    return InstrumentTable(title, header, cells)


def entropy(model: Reader, text: Text, chunk: int, moved: Moved) -> Lines:
    """Measure each layer's entropy, over its attention weights or over its scan's step sizes."""
    from hybridtron.evaluate.entropy import entropies

    measured = entropies(model, text.tokens_BT[:, :-1], chunk, advance(moved, text.length))
    return [{"length": text.length, **layer_entropy._asdict()} for layer_entropy in measured]


def entropy_table(lines: Lines, seq_len: int) -> InstrumentTable:
    """Show each layer's mean, smallest and largest entropy, and the upper bound."""
    values = ("entropy", "least", "greatest", "bound")
    cells = [(str(line["layer"]), line["kind"], *(f"{line[key]:.3f}" for key in values)) for line in lines]
    title = "entropy: of attention weights (attention) or step sizes (selection), in nats, over heads or channels"
    header = ("layer", "of", "mean", "smallest", "largest", "of equal weights")
    return InstrumentTable(title, header, cells)


def advance(moved: Moved, tokens: int) -> Callable[[int], None]:
    """Return a callback for chunks: it calls `moved` with the token count read so far, and with `tokens`."""
    read = 0

    def more(count: int) -> None:
        nonlocal read
        read += count
        moved(read, tokens)

    return more


INSTRUMENTS = {
    "positions": Instrument(positions, positions_table),
    "remembrance": Instrument(remembrance, remembrance_table),
    "states": Instrument(states, states_table),
    "entropy": Instrument(entropy, entropy_table),
}
