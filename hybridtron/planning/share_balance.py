"""Balance of computation between context-parallel ranks.

Shares of a row are contiguous and equally long, so all that every token costs alike is balanced. Attention is not: a
token sees those before it in its document, or in a window of it, so a share late in a long document has most to
compute. Attention whose sight is no window (spans) counts as in `count`, alike for every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridtron.architecture.attention import AttentionSpec, visible_tokens
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.planning.count import count

Spans = Sequence[tuple[int, int]]
"""First token and end of each document of a row."""


@dataclass(frozen=True)
class TokenCosts:
    """Forward FLOPs of a token: those of every token alike, and those of each visible key, by window."""

    alike: float
    by_window: Mapping[int | None, float]

    def of_shares(self, rows: Sequence[Spans], length: int, shares: int) -> list[float]:
        """Return the forward FLOPs of each share, over these rows of `length`."""
        share_length = length // shares
        flops_of_shares = []
        for first in range(0, length, share_length):
            keys = {w: sum(keys_seen(row, (first, first + share_length), w) for row in rows) for w in self.by_window}
            attention = sum(cost * keys[window] for window, cost in self.by_window.items())
            flops_of_shares.append(len(rows) * share_length * self.alike + attention)
        return flops_of_shares


def token_costs(model: ModelConfig, length: int) -> TokenCosts:
    """Return the forward FLOPs of a token in rows of `length`."""
    counted = count(model, length)
    alike = counted.forward_flops
    by_window = dict[int | None, float]()
    for layer, spec in zip(counted.layers, architecture(model).specs, strict=True):
        if isinstance(spec, AttentionSpec):
            attention = layer.flops["attention"]
            alike -= attention
            seen = attention / visible_tokens(length, spec.window)
            by_window[spec.window] = by_window.get(spec.window, 0.0) + seen
    return TokenCosts(alike, by_window)


def imbalance(flops: Sequence[float]) -> float:
    """Return the largest of these FLOPs over their mean."""
    return max(flops) * len(flops) / sum(flops)


def keys_seen(documents: Spans, share: tuple[int, int], window: int | None) -> int:
    """Count the keys that the tokens of a share see, all together."""
    keys = 0
    for begin, end in documents:
        first = max(begin, share[0])
        stop = min(end, share[1])
        if first < stop:
            keys += _seen_by_first(stop - begin, window) - _seen_by_first(first - begin, window)
    return keys


def _seen_by_first(tokens: int, window: int | None) -> int:
    """Count the keys that a document's first tokens see: 1, 2, 3 ... and then as many as the window has."""
    growing = tokens if window is None else min(tokens, window)
    return growing * (growing + 1) // 2 + (tokens - growing) * (window or 0)
