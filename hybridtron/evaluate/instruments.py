"""The instruments of length generalization (`length.py`) on held-out text: each one's lines, and a table of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from hybridtron.evaluate.pictures import Lines, draw
from hybridtron.requirements import is_there
from hybridtron.train.records import write_whole

if TYPE_CHECKING:
    from hybridtron.config.schema import Config
    from hybridtron.evaluate.held_out import Text
    from hybridtron.model.generate import Reader

STATE_POSITIONS = 64  # at which the states are looked at
TOLERANCE = 0.02  # by which perplexity may rise beyond the training length
Moved = Callable[[int, int], object]
"""Called with the tokens of a row that were read, and how many there are to read."""


def written(
    name: str, model: Reader, config: Config, text: Text, first: bool, output: Path, moved: Moved
) -> Table | None:
    """Measure by an instrument; the first process writes its lines and its picture. None: there is nothing to measure.

    All ranks of the model call this together.
    """
    from hybridtron.evaluate.length import attention_at_eval, fitting_chunk

    piece = fitting_chunk(config.model, len(text.tokens_BT), model.context.size)
    attention = attention_at_eval(config.model)
    lines, table = INSTRUMENTS[name](model, text, piece, moved)
    if not lines:
        return None
    if first:
        lines_of_json = (json.dumps({**line, "attention": attention}) + "\n" for line in lines)
        write_whole(output / f"{name}.jsonl", "".join(lines_of_json))
        if is_there("matplotlib"):
            draw(name, lines, text.seq_len, output / f"{name}.png")
    return table


def positions(model: Reader, text: Text, piece: int, moved: Moved) -> tuple[Lines, Table]:
    """Loss by position, and of the same tokens within the training length; in the table by doublings of that."""
    from hybridtron.evaluate.length import position_losses
    from hybridtron.evaluate.within import losses_within, short_rows

    again = sum(row.end - row.start for row in short_rows(text.length, text.seq_len))
    advanced = advance(moved, text.length + again)
    losses_L = position_losses(model, text.tokens_BT, piece, advanced)
    within_L = losses_within(model, text.tokens_BT, text.seq_len, piece, advanced)
    columns = zip(losses_L.tolist(), losses_L.exp().tolist(), within_L.tolist(), strict=True)
    lines = [
        {"position": position, "loss": loss, "perplexity": perplexity, "loss_within": within}
        for position, (loss, perplexity, within) in enumerate(columns, start=1)
    ]
    table = Table("tokens before", "of the training length", "perplexity", "same tokens within it", box=None)
    for one in rises(lines, text.seq_len):
        reach = f"to {one.last / text.seq_len:.3g}x"
        table.add_row(f"{one.first} to {one.last}", reach, f"{one.perplexity:.4g}", f"{one.within:.4g}")
    if found := verdict(lines, text.seq_len):
        says = "generalizes to this length" if found.holds else "does not generalize to this length"
        most = f"at most {found.most:.4g} times the perplexity of the same tokens within the training length"
        table.caption = f"{says}: {most} (tolerance {TOLERANCE:.0%})"
    return lines, table


class Rise(NamedTuple):
    """The perplexity of predictions that had `first` to `last` tokens before them, all shown or the nearest alone."""

    first: int
    last: int
    perplexity: float
    within: float


def rises(lines: Lines, seq_len: int) -> list[Rise]:
    """By doublings of the training length, of what `positions` wrote."""
    import torch

    from hybridtron.evaluate.length import perplexity_bins

    losses_L, within_L = (
        torch.tensor([line[key] for line in lines], dtype=torch.float64) for key in ("loss", "loss_within")
    )
    both = zip(perplexity_bins(losses_L, seq_len), perplexity_bins(within_L, seq_len), strict=True)
    return [Rise(*one, within.perplexity) for one, within in both]


class Verdict(NamedTuple):
    """The greatest ratio, beyond the training length, of perplexity to that of the same tokens within it."""

    most: float

    @property
    def holds(self) -> bool:
        return self.most <= 1 + TOLERANCE


def verdict(lines: Lines, seq_len: int) -> Verdict | None:
    """Length generalization: no worse beyond the training length than within it, in any doubling.

    Buitrago Ruiz & Gu (definition 3.2) ask it of perplexity by position alone, on as much text as makes that level.
    None where no position is beyond the training length.
    """
    beyond = rises(lines, seq_len)[1:] if len(lines) > seq_len else []
    return Verdict(max(one.perplexity / one.within for one in beyond)) if beyond else None


def remembrance(model: Reader, text: Text, piece: int, moved: Moved) -> tuple[Lines, Table]:
    """Effective Remembrance from the far past to the last token."""
    from hybridtron.evaluate.length import effective_remembrance, remembrance_points

    ts = remembrance_points(text.length)
    advanced = advance(moved, text.length + sum(text.length - t for t in ts if t))
    measured = effective_remembrance(model, text.tokens_BT[:, :-1], ts, piece, advanced)
    table = Table("tokens not shown", "shown", "total variation", "Jensen-Shannon", "cosine distance", box=None)
    for t, *distances in measured:
        table.add_row(str(t), str(text.length - t), *(f"{value:.3g}" for value in distances))
    return [{"length": text.length, **one._asdict()} for one in measured], table


def states(model: Reader, text: Text, piece: int, moved: Moved) -> tuple[Lines, Table]:
    """Deviations of the states; in the table at the end against the training length."""
    from hybridtron.evaluate.length import state_deviation

    every = max(1, text.length // STATE_POSITIONS)
    measured = state_deviation(model, text.tokens_BT[:, :-1], every, piece, advance(moved, text.length))
    table = Table("layer", "position", "deviation", "position", "deviation", "grows by", "most in a head", box=None)
    for layer in dict.fromkeys(one.layer for one in measured):
        of_layer = [one for one in measured if one.layer == layer]
        before, after = min(of_layer, key=lambda one: abs(one.position - text.seq_len)), of_layer[-1]
        heads = [late / max(early, 1e-30) for early, late in zip(before.deviations, after.deviations, strict=True)]
        at = [str(value) for one in (before, after) for value in (one.position, f"{one.overall:.4g}")]
        grown = after.overall / max(before.overall, 1e-30)
        table.add_row(str(layer), *at, f"x {grown:.3g}", f"x {max(heads):.3g}" if len(heads) > 1 else "no heads")
    return [{**one._asdict(), "overall": one.overall} for one in measured], table


def entropy(model: Reader, text: Text, piece: int, moved: Moved) -> tuple[Lines, Table]:
    """How widely each layer looks: of attention by the last queries, of a scan by its step sizes."""
    from hybridtron.evaluate.entropy import entropies

    measured = entropies(model, text.tokens_BT[:, :-1], piece, advance(moved, text.length))
    table = Table("layer", "of", "entropy", "least", "greatest", "at most", box=None)
    for layer, kind, *values in measured:
        table.add_row(str(layer), kind, *(f"{value:.3f}" for value in values))
    return [{"length": text.length, **one._asdict()} for one in measured], table


def advance(moved: Moved, tokens: int) -> Callable[[int], None]:
    """Adds up how many more tokens of every row have been read."""
    read = 0

    def more(count: int) -> None:
        nonlocal read
        read += count
        moved(read, tokens)

    return more


INSTRUMENTS = {"positions": positions, "remembrance": remembrance, "states": states, "entropy": entropy}
