"""What an attention kernel of another package does, for the rehearsal under way."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybridtron.rehearse import heard


def attention_work(
    name: str, read: Sequence[Tensor], written: Sequence[Tensor], causal: bool, window: tuple[int, int], products: int
) -> None:
    """`products` of queries and keys, or of weights and values, over the pairs that are seen: (B, L, H, K) each."""
    moved = sum(x.numel() * x.element_size() for x in (*read, *written))
    batch, queries, heads, size = read[0].shape
    pairs = seen_pairs(queries, read[1].shape[1], causal, window[0])
    heard.runs(name, moved, 2 * products * batch * heads * size * pairs)


def seen_pairs(queries: int, keys: int, causal: bool, before: int) -> int:
    """Pairs of a query and a key that it sees; the last query stands at the last key, `before` keys behind are seen."""
    if not causal:
        return queries * keys
    most = keys if before < 0 else min(before + 1, keys)
    first = keys - queries + 1  # keys that the first query may see
    growing = max(0, min(most, keys) - first)  # queries that see one more than the query before
    return growing * first + growing * (growing - 1) // 2 + (queries - growing) * min(most, keys)
