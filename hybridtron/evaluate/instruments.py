"""The instruments of length generalization (`length.py`) on held-out text: each one's lines, and a table of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
    """Loss and perplexity by position; in the table by doublings of the training length."""
    from hybridtron.evaluate.length import perplexity_bins, position_losses

    losses_L = position_losses(model, text.tokens_BT, piece, advance(moved, text.length))
    columns = enumerate(zip(losses_L.tolist(), losses_L.exp().tolist(), strict=True), start=1)
    lines = [{"position": position, "loss": loss, "perplexity": ppl} for position, (loss, ppl) in columns]
    table = Table("tokens before", "of the training length", "perplexity", box=None)
    if found := verdict(losses_L.tolist(), text.seq_len):
        says = "generalizes to this length" if found.holds else "does not generalize to this length"
        least = f"at least {found.best:.4g} up to the training length, at most {found.worst:.4g} beyond"
        table.caption = f"{says}: {least} (tolerance {TOLERANCE:.0%})"
    for first, last, perplexity in perplexity_bins(losses_L, text.seq_len):
        table.add_row(f"{first} to {last}", f"to {last / text.seq_len:.3g}x", f"{perplexity:.4g}")
    return lines, table


class Verdict(NamedTuple):
    """The least perplexity up to the training length, and the greatest beyond it."""

    best: float
    worst: float

    @property
    def holds(self) -> bool:
        return self.worst <= self.best * (1 + TOLERANCE)


def verdict(losses: Sequence[float], seq_len: int) -> Verdict | None:
    """Length generalization (Buitrago Ruiz & Gu, definition 3.2), over means of neighbours, eight to a doubling.

    None where no position is beyond the training length.
    """
    import torch

    from hybridtron.evaluate.length import perplexity_bins

    if len(losses) <= seq_len:
        return None
    losses_L = torch.tensor(losses, dtype=torch.float64)
    within, beyond = perplexity_bins(losses_L[:seq_len], 1, 8), perplexity_bins(losses_L, seq_len, 8)[1:]
    return Verdict(min(one.perplexity for one in within), max(one.perplexity for one in beyond))


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
