"""Perplexity of held-out text, by length or in sliding windows; nats per token and bits per byte.

    perplexity = exp(sum of -log q / tokens),   bits per byte = sum of -log2 q / bytes

Each row or window starts from zero states and has no BOS; its first token is not predicted. The token that ends a
document is predicted and counted as a token, with no bytes. Models with different tokenizers can be compared by bits
per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from hybridtron.config.schema import DataConfig
from hybridtron.evaluate.answers import everyone
from hybridtron.evaluate.held_out import read_text
from hybridtron.evaluate.length import fitting_chunk, token_losses
from hybridtron.evaluate.records import Line, Lines
from hybridtron.evaluate.served import Served
from hybridtron.evaluate.suites import PerplexityOf


def rows_of(folder: Path, data: DataConfig, wanted: PerplexityOf, seq_len: int, path: str | None) -> tuple[Tensor, str]:
    """Read the rows or windows, (B, length + 1), and describe them in words.

    Windows are cut from one long row.
    """
    if not wanted.stride:
        text = read_text(folder, data, seq_len, path, wanted.length, wanted.count)
        return text.tokens_BT, text.described
    tokens = wanted.length + 1 + (wanted.count - 1) * wanted.stride
    text = read_text(folder, data, seq_len, path, tokens - 1, 1)
    return text.tokens_BT[0].unfold(0, wanted.length + 1, wanted.stride), f"windows of: {text.described}"


def measure(
    model: Served, wanted: PerplexityOf, rows_BT: Tensor, described: str, records: Lines, batch: int, moved: Callable
) -> None:
    """Score all rows that are not recorded yet, and record them. Model replicas take batches in turn.

    `moved` is called with the rows scored so far and in total.
    """
    missing = [index for index in range(len(rows_BT)) if wanted.key(index) not in records]
    for first in range(0, len(missing), batch * model.replicas):
        turn_indices = missing[first : first + batch * model.replicas]
        own_indices = turn_indices[model.replica * batch :][:batch]
        if own_indices:
            lines = scored(model, wanted, rows_BT, own_indices, described)
        else:
            lines = []
        records.add(everyone(model, lines))
        moved(first + len(turn_indices), len(missing))


def scored(model: Served, wanted: PerplexityOf, rows_BT: Tensor, indices: Sequence[int], described: str) -> list[Line]:
    """Score a batch and return its lines: nats, tokens and bytes in each row's scored part."""
    tokens_BT = rows_BT[list(indices)]
    chunk = fitting_chunk(model.config.model, len(indices), model.read.context.size)
    losses_LB = token_losses(model.read, tokens_BT, chunk)
    lines = []
    for row, index in enumerate(indices):
        if wanted.stride and wanted.score == "new" and index:
            first = wanted.length - wanted.stride
        else:
            first = 0
        losses_L = losses_LB[first:, row]
        tokens = tokens_BT[row, first:].tolist()
        bytes_scored = len(model.tokenizer.decode(tokens).encode()) - len(model.tokenizer.decode(tokens[:1]).encode())
        about = {"key": wanted.key(index), "task": wanted.label, "length": wanted.length, "index": index}
        sums = {"nats": losses_L.sum().item(), "tokens": len(losses_L), "bytes": bytes_scored}
        lines.append({**about, **sums, "text": described})
    return lines
