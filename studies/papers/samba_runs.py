"""Training runs for the Samba paper (samba.yaml, tables.yaml, entropy.yaml), and the measurement of each run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtron.sweep.grid import SEED, SweepRun
from studies.long_text import Curve, held_out_rows
from studies.results import Part
from studies.study import selected

if TYPE_CHECKING:
    from torch import Tensor

    from hybridtron.model.lm import LanguageModel

HERE = Path(__file__).parent
CONTEXT = 256  # row length of training, except in Table 5
REPEATED = ("samba", "mamba", "llama", "llama-swa", "mamba-swa-mlp")  # models with three seeds
AT_ONCE = 2**14  # tokens in a batch of reading


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real study, or for a quick one that takes a minute."""

    settings: tuple[str, ...] = ()
    variants: Mapping[str, tuple[str, ...]] | None = None  # by the sweep's name; None: all
    seeds: tuple[str, ...] = ("1", "2", "3")
    vocab_size: int = 2048
    lengths: tuple[int, ...] = (256, 512, 1024, 8192)  # evaluated row lengths of samba.yaml's models
    table_lengths: tuple[int, ...] = (128, 256, 512, 1024)
    tokens: int = 2**17  # evaluated tokens, spread evenly over the held-out text; the same for every row length
    entropy_rows: int = 100


STUDY = Sizes()
QUICK = Sizes(  # large enough for full attention to fail beyond its rows
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


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STUDY


def part_of(part: str, sizes: Sizes, runs: Path, data: Path) -> Part:
    """Return the part `samba`, `tables` or `entropy`: its runs with their data, and its measurement.

    `data` is the folder of prepared tokens.
    """

    def more(run: SweepRun) -> tuple[str, ...] | None:
        known = sizes.variants is None or run.variant in sizes.variants[part]
        again = run.values[SEED] == "1" or run.variant in REPEATED or part == "entropy"
        if not (known and again and run.values[SEED] in sizes.seeds):
            return None
        return (*sizes.settings, f"data.path={data}")

    sweep, folder = selected(HERE / f"{part}.yaml", runs / part, more)
    lengths = {"samba": sizes.lengths, "tables": sizes.table_lengths, "entropy": (CONTEXT,)}[part]
    asked: dict[str, Any] = {"lengths": lengths, "tokens": sizes.tokens}
    if part != "tables":
        asked["entropy_rows"] = sizes.entropy_rows
    return Part(sweep, folder, lambda _, path: of_run(path, lengths, sizes, part != "tables"), asked)


def of_run(run: Path, lengths: Sequence[int], sizes: Sizes, whole: bool) -> dict[str, Any]:
    """Measure perplexity on the same text in rows of each length.

    With `whole` also perplexity by position in the longest rows, and entropies.
    """
    from hybridtron.cli.arguments import newest_checkpoint
    from hybridtron.evaluate.held_out import trained_model

    model, config, _ = trained_model(newest_checkpoint(run), None)
    spans_BT = held_out_rows(config.data, max(lengths) + 1, sizes.tokens // max(lengths))
    losses = {length: losses_in_rows(model, spans_BT, length) for length in lengths}
    results: dict[str, Any] = {
        "perplexity": {str(length): math.exp(sum(of) / len(of)) for length, of in losses.items()},
    }
    if whole:
        results["curve"] = asdict(Curve.of(losses[max(lengths)], CONTEXT))
        results["entropy"] = entropy_of(model, spans_BT, sizes.entropy_rows)
    return results


def losses_in_rows(model: LanguageModel, spans_BT: Tensor, length: int) -> list[float]:
    """Return the mean loss by position on a text in rows of `length` tokens, each from zero states."""
    import torch

    from hybridtron.evaluate.length import position_losses
    from hybridtron.inference.reader import reader

    rows_BT = spans_BT.unfold(1, length + 1, length).flatten(0, 1)
    turns = rows_BT.split(max(1, AT_ONCE // length))
    losses = [len(turn) * position_losses(reader(model), turn, min(length, 2 * CONTEXT)) for turn in turns]
    return (torch.stack(losses).sum(0) / len(rows_BT)).tolist()


def entropy_of(model: LanguageModel, spans_BT: Tensor, rows: int) -> list[dict[str, Any]]:
    """Measure each attending or scanning layer's entropy, over rows of the training length (Figure 5)."""
    from hybridtron.evaluate.entropy import entropies
    from hybridtron.inference.reader import reader

    rows_BL = spans_BT.unfold(1, CONTEXT, CONTEXT).flatten(0, 1)
    evenly = rows_BL[:: max(1, len(rows_BL) // rows)][:rows]
    return [layer._asdict() for layer in entropies(reader(model), evenly, CONTEXT)]
