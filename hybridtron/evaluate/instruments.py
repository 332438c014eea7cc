"""The instruments of length generalization (`length.py`) applied to held-out text: each writes lines and has a table.

A table is computed from the lines alone, so that earlier measurements are shown without reading the text again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hybridtron.evaluate.pictures import Lines, draw
from hybridtron.requirements import is_there
from hybridtron.train.records import read_lines, write_whole

if TYPE_CHECKING:
    from hybridtron.config.schema import Config
    from hybridtron.evaluate.held_out import Text
    from hybridtron.model.generate import Reader

STATE_POSITIONS = 64  # number of positions at which states are measured
TOLERANCE = 0.02  # fraction by which perplexity may rise beyond the training length
Moved = Callable[[int, int], object]
"""Progress callback: called with the tokens of a row that were read so far, and with their total."""


class InstrumentTable(NamedTuple):
    """An instrument's lines in short: a title, columns, rows, and a sentence below them."""

    title: str
    header: tuple[str, ...]
    cells: Sequence[Sequence[str]]
    note: str = ""


class Instrument(NamedTuple):
    """Two functions: `measure` reads a text and returns lines, `table` shows lines, given the training length."""

    measure: Callable[[Reader, Text, int, Moved], Lines]
    table: Callable[[Lines, int], InstrumentTable]


def written(name: str, model: Reader, config: Config, text: Text, first: bool, output: Path, moved: Moved) -> bool:
    """Measure with an instrument; the first process writes its lines and its picture.

    Returns False if there is nothing to measure. The model's ranks call this together.
    """
    from hybridtron.evaluate.length import attention_at_eval, fitting_chunk

    piece = fitting_chunk(config.model, len(text.tokens_BT), model.context.size)
    attention = attention_at_eval(config.model)
    lines = INSTRUMENTS[name].measure(model, text, piece, moved)
    if first and lines:
        lines_of_json = (json.dumps({**line, "attention": attention}) + "\n" for line in lines)
        write_whole(output / f"{name}.jsonl", "".join(lines_of_json))
        if is_there("matplotlib"):
            draw(name, lines, text.seq_len, output / f"{name}.png")
    return bool(lines)


def table_of(name: str, folder: Path, seq_len: int) -> InstrumentTable:
    """Build the table from the lines that an instrument wrote earlier."""
    return INSTRUMENTS[name].table(read_lines(folder / f"{name}.jsonl"), seq_len)


def positions(model: Reader, text: Text, piece: int, moved: Moved) -> Lines:
    """Measure loss by position, and again with the context limited to the training length."""
    from hybridtron.evaluate.length import position_losses
    from hybridtron.evaluate.within import losses_within, short_rows

    tokens_again = sum(row.end - row.start for row in short_rows(text.length, text.seq_len))
    advanced = advance(moved, text.length + tokens_again)
    losses_L = position_losses(model, text.tokens_BT, piece, advanced)
    within_L = losses_within(model, text.tokens_BT, text.seq_len, piece, advanced)
    columns = zip(losses_L.tolist(), losses_L.exp().tolist(), within_L.tolist(), strict=True)
    return [
        {"position": position, "loss": loss, "perplexity": perplexity, "loss_within": within}
        for position, (loss, perplexity, within) in enumerate(columns, start=1)
    ]


def positions_table(lines: Lines, seq_len: int) -> InstrumentTable:
    """Show perplexity by doublings of the training length."""
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
        most = f"at most {decision.most:.4g} times the perplexity of the same tokens within the training length"
        note = f"{claim}: {most} (tolerance {TOLERANCE:.0%})"
    header = ("tokens before", "of the training length", "perplexity", "same tokens within it")
    return InstrumentTable("positions: perplexity by the number of tokens before", header, cells, note)


class Rise(NamedTuple):
    """Perplexity after `first` to `last` tokens: with all, or only the nearest, shown (`within`)."""

    first: int
    last: int
    perplexity: float
    within: float


def rises(lines: Lines, seq_len: int) -> list[Rise]:
    """Compute perplexities by doublings of the training length, from the lines that `positions` wrote."""
    import torch

    from hybridtron.evaluate.length import perplexity_bins

    losses_L, within_L = (
        torch.tensor([line[key] for line in lines], dtype=torch.float64) for key in ("loss", "loss_within")
    )
    bin_pairs = zip(perplexity_bins(losses_L, seq_len), perplexity_bins(within_L, seq_len), strict=True)
    return [Rise(*full_bin, within_bin.perplexity) for full_bin, within_bin in bin_pairs]


class Verdict(NamedTuple):
    """The largest ratio between perplexity beyond the training length and with the context limited to it."""

    most: float

    @property
    def holds(self) -> bool:
        """True if the ratio is within the tolerance."""
        return self.most <= 1 + TOLERANCE


def verdict(lines: Lines, seq_len: int) -> Verdict | None:
    """Decide on length generalization: perplexity must not be worse beyond the training length, in any doubling.

    Buitrago Ruiz & Gu (definition 3.2) require this of perplexity by position alone, on enough text to level out its
    difficulty. Returns None if no position is beyond the training length.
    """
    if len(lines) > seq_len:
        beyond = rises(lines, seq_len)[1:]
    else:
        beyond = []
    if beyond:
        return Verdict(max(rise.perplexity / rise.within for rise in beyond))
    return None


def remembrance(model: Reader, text: Text, piece: int, moved: Moved) -> Lines:
    """Measure Effective Remembrance from the far past to the last token."""
    from hybridtron.evaluate.length import effective_remembrance, remembrance_points

    ts = remembrance_points(text.length)
    advanced = advance(moved, text.length + sum(text.length - t for t in ts if t))
    measured = effective_remembrance(model, text.tokens_BT[:, :-1], ts, piece, advanced)
    return [{"length": text.length, **measurement._asdict()} for measurement in measured]


def remembrance_table(lines: Lines, seq_len: int) -> InstrumentTable:
    """Show the distances by how many tokens are hidden from the model."""
    distances = ("total_variation", "jensen_shannon", "cosine")
    cells = [
        (str(line["t"]), str(line["length"] - line["t"]), *(f"{line[key]:.3g}" for key in distances)) for line in lines
    ]
    title = "remembrance: how far the next token's distribution moves when the first tokens are not shown"
    header = ("tokens not shown", "shown", "total variation", "Jensen-Shannon", "cosine distance")
    return InstrumentTable(title, header, cells)


def states(model: Reader, text: Text, piece: int, moved: Moved) -> Lines:
    """Measure the recurrent states' standard deviation along the row."""
    from hybridtron.evaluate.length import state_deviation

    every = max(1, text.length // STATE_POSITIONS)
    measured = state_deviation(model, text.tokens_BT[:, :-1], every, piece, advance(moved, text.length))
    return [{**deviation._asdict(), "overall": deviation.overall} for deviation in measured]


def states_table(lines: Lines, seq_len: int) -> InstrumentTable:
    """Compare deviations at the end with those near the training length."""
    cells = []
    for layer in dict.fromkeys(line["layer"] for line in lines):
        layer_lines = [line for line in lines if line["layer"] == layer]
        before = min(layer_lines, key=lambda line: abs(line["position"] - seq_len))
        after = layer_lines[-1]
        deviation_pairs = zip(before["deviations"], after["deviations"], strict=True)
        growth_by_head = [late / max(early, 1e-30) for early, late in deviation_pairs]
        both_positions = [
            str(value) for line in (before, after) for value in (line["position"], f"{line['overall']:.4g}")
        ]
        growth = f"x {after['overall'] / max(before['overall'], 1e-30):.3g}"
        cells.append(
            (str(layer), *both_positions, growth, f"x {max(growth_by_head):.3g}" if len(growth_by_head) > 1 else "-")
        )
    title = "states: standard deviation of each layer's recurrent state, near the training length and at the end"
    header = ("layer", "position", "deviation", "position", "deviation", "grows by", "largest of a head")
    return InstrumentTable(title, header, cells)


def entropy(model: Reader, text: Text, piece: int, moved: Moved) -> Lines:
    """Measure how widely each layer looks: attention by its last queries, scans by their step sizes."""
    from hybridtron.evaluate.entropy import entropies

    measured = entropies(model, text.tokens_BT[:, :-1], piece, advance(moved, text.length))
    return [{"length": text.length, **layer_entropy._asdict()} for layer_entropy in measured]


def entropy_table(lines: Lines, seq_len: int) -> InstrumentTable:
    """Show entropies by layer."""
    values = ("entropy", "least", "greatest", "bound")
    cells = [(str(line["layer"]), line["kind"], *(f"{line[key]:.3f}" for key in values)) for line in lines]
    title = "entropy: how widely each layer looks, in nats; means over heads or channels"
    header = ("layer", "of", "mean", "smallest", "largest", "of a uniform choice")
    return InstrumentTable(title, header, cells)


def advance(moved: Moved, tokens: int) -> Callable[[int], None]:
    """Return a callback that adds up the tokens read and reports them to `moved`."""
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
