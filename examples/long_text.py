"""Perplexity by position of held-out text that is many times as long as the rows of training: numbers and curves."""

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
    from hybridtron.model.generate import Reader

PER_DOUBLING = 2  # bins of positions


@dataclass(frozen=True)
class Curve:
    """Perplexity by bins of positions, each named by its last one."""

    ends: list[int]
    perplexities: list[float]

    @staticmethod
    def of(losses: Sequence[float], context: int) -> Curve:
        import torch

        from hybridtron.evaluate.length import perplexity_bins

        odd = context // (context & -context)  # whose doublings come by the context, so that it ends a bin
        bins = perplexity_bins(torch.tensor(losses, dtype=torch.float64), odd, PER_DOUBLING)
        return Curve([one.last for one in bins], [one.perplexity for one in bins])

    def at(self, position: int) -> float:
        """In the bin that ends there."""
        return self.perplexities[self.ends.index(position)]

    def near(self, position: int) -> float:
        """In the bin that ends there, or the last before it."""
        return self.at(max(end for end in self.ends if end <= position))

    @property
    def least(self) -> float:
        return min(self.perplexities)


@dataclass(frozen=True)
class Beyond:
    """Perplexity by position of long rows, and of the same tokens, each read within the training context.

    Positions of one text differ, because text is harder in one place than in another; that moves both curves alike, so
    that their ratio says what the tokens further back do to the model.
    """

    curve: Curve
    within: Curve

    @staticmethod
    def of(model: Reader, tokens_BT: Tensor, context: int) -> Beyond:
        from hybridtron.evaluate.length import position_losses
        from hybridtron.evaluate.within import losses_within

        far = position_losses(model, tokens_BT, 2 * context)
        near = losses_within(model, tokens_BT, context, 2 * context)
        return Beyond(Curve.of(far.tolist(), context), Curve.of(near.tolist(), context))

    def risen(self, position: int) -> float:
        """The logarithm of the ratio."""
        return math.log(self.curve.near(position) / self.within.near(position))


def long_text_losses(run: Path, multiples: int, rows: int) -> list[float]:
    """Mean loss by position over rows of held-out text, each many times as long as the rows of training."""
    from hybridtron.cli.given import newest_checkpoint
    from hybridtron.evaluate.held_out import trained_model
    from hybridtron.evaluate.length import position_losses
    from hybridtron.model.generate import reader

    model, config, seq_len = trained_model(newest_checkpoint(run), None)
    tokens_BT = held_out_rows(config.data, seq_len * multiples + 1, rows)
    return position_losses(reader(model), tokens_BT, 2 * seq_len).tolist()


def held_out_rows(data: DataConfig, tokens: int, rows: int) -> Tensor:
    """Held-out text, packed end to end and cut anywhere, as training rows are; evenly over all of it."""
    import torch

    from hybridtron.data.order.stream import DocumentStream, RowSpans
    from hybridtron.data.rows import gather
    from hybridtron.evaluate.held_out import open_sources
    from hybridtron.problems import Unusable

    sources = open_sources(data, None)
    stores = sources.stores("validation")
    streams = [DocumentStream(store) for store in stores]
    stride = sum(stream.tokens_per_epoch for stream in streams) // rows  # rows overlap: each position sees all
    spans = [
        RowSpans([(source, span) for span in stream.spans(start, tokens)], 0)
        for source, stream in enumerate(streams)
        for start in range(0, stream.tokens_per_epoch - tokens, stride)
    ]
    if not spans:
        raise Unusable(
            f"{data.path}: all of its held-out text is shorter than the {tokens} tokens that are read at once"
        )
    return torch.from_numpy(gather(stores, spans, sources.dtype, joined=True).tokens_BT.astype("int64"))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation, or the value where it is the only one."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def draw_seeds(
    axes: Axes, places: Sequence[int], seeds: Sequence[Sequence[float]], color: str, label: str | None, style: str
) -> None:
    """The mean over seeds, in a band from the lowest to the highest."""
    values = list(zip(*seeds, strict=True))
    axes.plot(places, [statistics.mean(one) for one in values], style, color=color, label=label)
    axes.fill_between(places, list(map(min, values)), list(map(max, values)), color=color, alpha=0.15, lw=0)


def frame(axes: Axes, shown: Sequence[Curve], context: int, first: int) -> None:
    """Axes of curves from a position on, with a line at the context; logarithmic where perplexities are far apart."""
    from matplotlib.ticker import LogFormatter

    values = [value for one in shown for end, value in zip(one.ends, one.perplexities, strict=True) if end >= first]
    far = max(values) > 3 * min(values)
    axes.axvline(context, color="black", linestyle=":", linewidth=0.8, label=f"context {context}")
    axes.set(xscale="log", yscale="log" if far else "linear", xlabel="position (tokens before)", ylabel="perplexity")
    axes.set(xlim=(first, None), ylim=(min(values) / 1.03, max(values) * 1.03))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    if far:
        axes.yaxis.set_minor_formatter(LogFormatter())
