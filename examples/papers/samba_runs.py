"""What of the Samba paper is trained (samba.yaml, tables.yaml, entropy.yaml), and what is measured on every run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.long_text import Curve, held_out_rows
from examples.results import Part
from examples.study import selected
from hybridtron.sweep.grid import SEED, SweepRun

if TYPE_CHECKING:
    from torch import Tensor

    from hybridtron.model.lm import LanguageModel

HERE = Path(__file__).parent
CONTEXT = 256  # tokens of a row of training, but in Table 5
REPEATED = ("samba", "mamba", "llama", "llama-swa", "mamba-swa-mlp")  # models with three seeds
AT_ONCE = 2**14  # tokens that are read at once


@dataclass(frozen=True)
class Sizes:
    """How much is done: the real study, or one of a minute."""

    settings: tuple[str, ...] = ()
    variants: Mapping[str, tuple[str, ...]] | None = None  # by the sweep's name; None: all
    seeds: tuple[str, ...] = ("1", "2", "3")
    vocab_size: int = 2048
    lengths: tuple[int, ...] = (256, 512, 1024, 8192)  # of rows that samba.yaml's models read
    table_lengths: tuple[int, ...] = (128, 256, 512, 1024)
    tokens: int = 2**17  # of held-out text, evenly over all of it, which is read in rows of every length
    entropy_rows: int = 100


STUDY = Sizes()
QUICK = Sizes(  # at which full attention already fails beyond its rows
    settings=(
        "model.width=96", "model.vocab_size=512", "model.layers.-.hidden=256", "phases.0.tokens=1M",
        "run.eval_tokens=1K",
    ),
    variants={
        "samba": ("samba", "llama", "llama-swa", "mamba"),
        "tables": ("samba", "full-1"),
        "entropy": ("samba-deep", "mamba-mlp-deep"),
    },
    seeds=("1",),
    vocab_size=512,
    table_lengths=(256, 512),
    tokens=2**14,
    entropy_rows=4,
)  # fmt: skip


def part_of(part: str, sizes: Sizes, runs: Path, data: Path) -> Part:
    """The runs of `samba`, `tables` or `entropy`, on a folder of prepared tokens, and what is measured on them."""

    def more(run: SweepRun) -> tuple[str, ...] | None:
        known = sizes.variants is None or run.variant in sizes.variants[part]
        again = run.values[SEED] == "1" or run.variant in REPEATED or part == "entropy"
        return (*sizes.settings, f"data.path={data}") if known and again and run.values[SEED] in sizes.seeds else None

    sweep, folder = selected(HERE / f"{part}.yaml", runs / part, more)
    lengths = {"samba": sizes.lengths, "tables": sizes.table_lengths, "entropy": (CONTEXT,)}[part]
    asked: dict[str, Any] = {"lengths": lengths, "tokens": sizes.tokens}
    if part != "tables":
        asked["entropy_rows"] = sizes.entropy_rows
    return Part(sweep, folder, lambda _, path: of_run(path, lengths, sizes, part != "tables"), asked)


def of_run(run: Path, lengths: Sequence[int], sizes: Sizes, whole: bool) -> dict[str, Any]:
    """Perplexity by length of the rows that the same text is read in; of the longest also by position; entropies."""
    from hybridtron.cli.given import newest_checkpoint
    from hybridtron.evaluate.held_out import trained_model

    model, config, _ = trained_model(newest_checkpoint(run), None)
    spans_BT = held_out_rows(config.data, max(lengths) + 1, sizes.tokens // max(lengths))
    losses = {length: losses_in_rows(model, spans_BT, length) for length in lengths}
    found: dict[str, Any] = {
        "perplexity": {str(length): math.exp(sum(of) / len(of)) for length, of in losses.items()},
    }
    if whole:
        found["curve"] = asdict(Curve.of(losses[max(lengths)], CONTEXT))
        found["entropy"] = entropy_of(model, spans_BT, sizes.entropy_rows)
    return found


def losses_in_rows(model: LanguageModel, spans_BT: Tensor, length: int) -> list[float]:
    """Mean loss by position, of text that is read in rows of a length, each from zero states."""
    import torch

    from hybridtron.evaluate.length import position_losses
    from hybridtron.model.generate import reader

    rows_BT = spans_BT.unfold(1, length + 1, length).flatten(0, 1)
    turns = rows_BT.split(max(1, AT_ONCE // length))
    losses = [len(turn) * position_losses(reader(model), turn, min(length, 2 * CONTEXT)) for turn in turns]
    return (torch.stack(losses).sum(0) / len(rows_BT)).tolist()


def entropy_of(model: LanguageModel, spans_BT: Tensor, rows: int) -> list[dict[str, Any]]:
    """Of every layer that attends or scans, over rows of the training length (Figure 5)."""
    from hybridtron.evaluate.entropy import entropies
    from hybridtron.model.generate import reader

    rows_BL = spans_BT.unfold(1, CONTEXT, CONTEXT).flatten(0, 1)
    evenly = rows_BL[:: max(1, len(rows_BL) // rows)][:rows]
    return [one._asdict() for one in entropies(reader(model), evenly, CONTEXT)]
