"""Perplexity by position, on held-out text many times as long as the rows of training.

The module measures losses by position, bins them into curves, and draws curves over seeds. Several studies share it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from hybridtron.config.schema import DataConfig
    from hybridtron.inference.reader import Reader

YES_OR_NO = {True: "yes", False: "**no**"}
PER_DOUBLING = 2  # bins for each doubling of the position


@dataclass(frozen=True)
class Curve:
    """Perplexity by bins of positions; `ends` holds each bin's last position."""

    ends: list[int]
    perplexities: list[float]

    @staticmethod
    def of(losses: Sequence[float], context: int) -> Curve:
        import torch

        from hybridtron.evaluate.length import perplexity_bins

        odd = context // (context & -context)  # its doublings reach the context, so that a bin ends there
        bins = perplexity_bins(torch.tensor(losses, dtype=torch.float64), odd, PER_DOUBLING)
        return Curve([part.last for part in bins], [part.perplexity for part in bins])

    def at(self, position: int) -> float:
        """Return the perplexity of the bin that ends at this position."""
        return self.perplexities[self.ends.index(position)]

    def near(self, position: int) -> float:
        """Return the perplexity of the last bin that ends at or before this position."""
        return self.at(max(end for end in self.ends if end <= position))

    @property
    def least(self) -> float:
        return min(self.perplexities)


@dataclass(frozen=True)
class Beyond:
    """Perplexity by position in long rows (`curve`), and for the same tokens read within the training context
    (`within`).

    Some positions are harder than others. That moves both curves alike, so their ratio shows how tokens from further
    back affect the model.
    """

    curve: Curve
    within: Curve

    @staticmethod
    def of(model: Reader, tokens_BT: Tensor, context: int) -> Beyond:
        from hybridtron.evaluate.length import position_losses
        from hybridtron.evaluate.short_context import losses_within

        far = position_losses(model, tokens_BT, 2 * context)
        near = losses_within(model, tokens_BT, context, 2 * context)
        return Beyond(Curve.of(far.tolist(), context), Curve.of(near.tolist(), context))

    def risen(self, position: int) -> float:
        """Return the logarithm of the long rows' perplexity over that within the context, near a position."""
        return math.log(self.curve.near(position) / self.within.near(position))


def long_text_losses(run: Path, multiples: int, rows: int) -> list[float]:
    """Return the mean loss by position over held-out rows, each `multiples` times as long as the rows of training."""
    from hybridtron.cli.arguments import newest_checkpoint
    from hybridtron.evaluate.held_out import trained_model
    from hybridtron.evaluate.length import position_losses
    from hybridtron.inference.reader import reader

    model, config, seq_len = trained_model(newest_checkpoint(run), None)
    tokens_BT = held_out_rows(config.data, seq_len * multiples + 1, rows)
    return position_losses(reader(model), tokens_BT, 2 * seq_len).tolist()


def held_out_rows(data: DataConfig, tokens: int, rows: int) -> Tensor:
    """Return rows (B, T) of held-out text, packed end to end and cut at any place, as training rows are.

    They are spread evenly over the text. Raises Unusable if it is shorter than one row.
    """
    import torch

    from hybridtron.data.order.stream import DocumentStream, RowSpans
    from hybridtron.data.rows import gather
    from hybridtron.evaluate.held_out import open_sources
    from hybridtron.problems import Unusable

    sources = open_sources(data, None)
    stores = sources.stores("validation")
    streams = [DocumentStream(store) for store in stores]
    stride = (
        sum(stream.tokens_per_epoch for stream in streams) // rows
    )  # rows overlap, so that every position sees all of the text
    spans = [
        RowSpans([(source, span) for span in stream.spans(start, tokens)], 0)
        for source, stream in enumerate(streams)
        for start in range(0, stream.tokens_per_epoch - tokens, stride)
    ]
    if not spans:
        raise Unusable(
            f"{data.path}: all of its held-out text is shorter than the {tokens} tokens that are read at once",
            code="does-not-fit",
        )
    return torch.from_numpy(gather(stores, spans, sources.dtype, joined=True).tokens_BT.astype("int64"))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format mean and standard deviation, or a single value alone."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def draw_seeds(
    axes: Axes, places: Sequence[int], seeds: Sequence[Sequence[float]], *, color: str, label: str | None, style: str
) -> None:
    """Draw the mean over seeds, and a band from the lowest seed to the highest."""
    values = list(zip(*seeds, strict=True))
    axes.plot(places, [statistics.mean(by_seed) for by_seed in values], style, color=color, label=label)
    axes.fill_between(places, list(map(min, values)), list(map(max, values)), color=color, alpha=0.15, lw=0)


def frame(axes: Axes, shown: Sequence[Curve], context: int, first: int) -> None:
    """Set up axes for curves from position `first` on, with a line at the context.

    The perplexity axis is logarithmic if the largest perplexity is more than three times the lowest.
    """
    from matplotlib.ticker import LogFormatter

    values = [
        value for curve in shown for end, value in zip(curve.ends, curve.perplexities, strict=True) if end >= first
    ]
    far = max(values) > 3 * min(values)
    scale = "linear"
    if far:
        scale = "log"
    axes.axvline(context, color="black", linestyle=":", linewidth=0.8, label=f"context {context}")
    axes.set(xscale="log", yscale=scale, xlabel="position (tokens before)", ylabel="perplexity")
    axes.set(xlim=(first, None), ylim=(min(values) / 1.03, max(values) * 1.03))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    if far:
        axes.yaxis.set_minor_formatter(LogFormatter())
