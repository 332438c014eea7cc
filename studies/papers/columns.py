"""The third column of a claim's page: functions that read it from a trained run, and its cells' titles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtron.architecture.attention import ReadingAttention
from studies.long_text import Beyond, held_out_rows
from studies.papers.samba_runs import losses_in_rows
from studies.study import answers

TOKENS = 2**20  # tokens of held-out text, the same for every length
ROWS = 32  # rows of held-out text for perplexity by position
SAME_TEXT = "the same tokens within a context"
SAMPLES = 55  # samples of a task and length: five for each depth of a passkey


@dataclass(frozen=True)
class Column:
    """The titles of a column's cells, and the function that reads them from a run or checkpoint."""

    titles: tuple[str, ...]
    cells: Callable[[Path], Sequence[str]]


def in_rows(*lengths: int) -> Column:
    """Return a column with perplexities on the same held-out text, in rows of each length."""

    def cells(run: Path) -> list[str]:
        from hybridtron.cli.arguments import newest_checkpoint
        from hybridtron.evaluate.held_out import trained_model

        model, config, _ = trained_model(newest_checkpoint(run), None)
        spans_BT = held_out_rows(config.data, max(lengths) + 1, TOKENS // max(lengths))
        losses_by_length = (losses_in_rows(model, spans_BT, length) for length in lengths)
        return [f"{math.exp(sum(losses) / len(losses)):.2f}" for losses in losses_by_length]

    return Column(tuple(f"perplexity in rows of {length}" for length in lengths), cells)


def by_position(*multiples: int) -> Column:
    """Return a column with perplexities at multiples of the training length, and a ratio at the last one.

    The ratio compares with the perplexity on the same tokens within the training context.
    """

    def cells(run: Path) -> list[str]:
        from hybridtron.cli.arguments import newest_checkpoint
        from hybridtron.evaluate.held_out import trained_model
        from hybridtron.inference.reader import reader

        model, config, seq_len = trained_model(newest_checkpoint(run), None)
        tokens_BT = held_out_rows(config.data, seq_len * max(multiples) + 1, ROWS)
        perplexities = Beyond.of(reader(model), tokens_BT, seq_len)
        at = (perplexities.curve.at(seq_len * multiple) for multiple in multiples)
        over = math.exp(perplexities.risen(seq_len * max(multiples)))
        return [f"{value:.2f}" for value in (perplexities.curve.least, *at, over)]

    named = (f"at {multiple}x" for multiple in multiples)
    return Column(("least perplexity", *named, f"at {max(multiples)}x over {SAME_TEXT}"), cells)


def tasks(
    name: str,
    metric: str,
    lengths: Sequence[int],
    *,
    options: Mapping[str, Any] | None = None,
    samples: int = SAMPLES,
    attentions: Sequence[ReadingAttention | None] = (None,),
) -> Column:
    """Return a column with a task's results, or a group's average, by length and attention.

    The numbers are those of `hybridtron evaluate`.
    """
    asked = {"tasks": [{"task": name, "lengths": [*lengths], "samples": samples, "options": dict(options or {})}]}

    def cells(run: Path) -> list[str]:
        return [cell for how in attentions for cell in _found(run, asked, name, metric=metric, attention=how)]

    ways = {None: "", ReadingAttention.full: ", full attention", ReadingAttention.trained: ", as trained"}
    return Column(tuple(f"{name} at {length}{ways[how]}" for how in attentions for length in lengths), cells)


def _found(
    run: Path, asked: Mapping[str, Any], name: str, *, metric: str, attention: ReadingAttention | None
) -> list[str]:
    """Evaluate a run's newest checkpoint on a task; returns a cell for each length."""
    from hybridtron.cli.arguments import newest_checkpoint
    from hybridtron.evaluate.results import shown

    checkpoint = newest_checkpoint(run)
    output = checkpoint.parents[1] / "evaluation" / f"{checkpoint.name}-{name}-{attention or 'usual'}"
    rows = answers(checkpoint, asked, output, attention=attention)
    wanted = (name, f"average of {name}")
    return [shown(row) for row in rows if row["task"].partition("[")[0] in wanted and row["metric"] == metric]
