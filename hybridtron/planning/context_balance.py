"""Forward FLOPs of each context-parallel rank, to show how balanced the ranks' computation is.

Context-parallel ranks divide each row into equally long contiguous shards, so work with equal cost for every token is
balanced. Attention is not balanced: a token attends to all previous tokens in its document, up to its window. So the
rank with a late part of a long document computes the most. Span-expanded attention (chunked attention with selected
blocks) is counted with an equal cost for every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridtron.architecture.attention import AttentionSpec, visible_tokens
from hybridtron.architecture.table import Architecture
from hybridtron.planning.count import count

Spans = Sequence[tuple[int, int]]
"""The documents in a row, each as (index of its first token, index after its last token)."""


@dataclass(frozen=True)
class TokenCosts:
    """A model's forward FLOPs.

    alike: FLOPs per token for everything but attention
    by_window: window -> FLOPs per (token, visible key) pair, summed over the attention layers with this window; the
        window None stands for full attention
    """

    alike: float
    by_window: Mapping[int | None, float]

    def of_shards(self, rows: Sequence[Spans], length: int, shards: int) -> list[float]:
        """Return the forward FLOPs of each sequence shard, summed over the rows.

        length: how many tokens each row has
        shards: how many shards each row is divided into
        """
        shard_length = length // shards
        flops_of_shards = []
        for first in range(0, length, shard_length):
            keys = {w: sum(keys_seen(row, (first, first + shard_length), w) for row in rows) for w in self.by_window}
            attention = sum(cost * keys[window] for window, cost in self.by_window.items())
            flops_of_shards.append(len(rows) * shard_length * self.alike + attention)
        return flops_of_shards


def token_costs(arch: Architecture, length: int) -> TokenCosts:
    """Return the model's costs; `length` must be a row's token count."""
    counted = count(arch, length)
    alike = counted.forward_flops
    by_window = dict[int | None, float]()
    for layer, spec in zip(counted.layers, arch.specs, strict=True):
        if isinstance(spec, AttentionSpec):
            attention = layer.flops["attention"]
            alike -= attention
            seen = attention / visible_tokens(length, spec.window)
            by_window[spec.window] = by_window.get(spec.window, 0.0) + seen
    return TokenCosts(alike, by_window)


def imbalance(flops: Sequence[float]) -> float:
    """Return the ranks' maximum FLOPs divided by their mean FLOPs."""
    return max(flops) * len(flops) / sum(flops)


def keys_seen(documents: Spans, shard: tuple[int, int], window: int | None) -> int:
    """Return the number of keys that a token attends to, summed over the tokens in a shard.

    shard: (first token index, index after the last token)
    """
    keys = 0
    for begin, end in documents:
        first = max(begin, shard[0])
        stop = min(end, shard[1])
        if first < stop:
            keys += _seen_by_first(stop - begin, window) - _seen_by_first(first - begin, window)
    return keys


def _seen_by_first(tokens: int, window: int | None) -> int:
    """Return the number of keys that a token attends to, summed over the first `tokens` tokens in a document.

    The sum is 1 + 2 + 3 + ..., but no term is larger than the window.
    """
    growing = tokens if window is None else min(tokens, window)
    return growing * (growing + 1) // 2 + (tokens - growing) * (window or 0)
