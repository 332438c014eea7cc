"""Perplexity and bits per byte on held-out text, in rows with given lengths or in sliding windows.

    perplexity    = exp((sum over tokens of -log q) / token count)
    bits per byte = (sum over tokens of -log2 q) / byte count

q is the probability that the model gives a token. Each row or window starts from zero states, without BOS, so its first
token has no prediction and does not count. The end-of-text token counts as a token with zero bytes. Bits per byte can
be compared between models with different tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from hybridtron.config.schema import DataConfig
from hybridtron.evaluate.answers import everyone
from hybridtron.evaluate.held_out import read_text
from hybridtron.evaluate.length import fitting_chunk, token_losses
from hybridtron.evaluate.loaded_model import LoadedModel
from hybridtron.evaluate.sample_log import Line, Lines
from hybridtron.evaluate.suites import PerplexityOf


def rows_of(folder: Path, data: DataConfig, wanted: PerplexityOf, seq_len: int, path: str | None) -> tuple[Tensor, str]:
    """Read the tokens in the rows or windows. Returns (B, length + 1), and a description in words.

    Windows are cut from one long row.
    """
    if not wanted.stride:
        text = read_text(folder, data, seq_len, path, wanted.length, wanted.count)
        return text.tokens_BT, text.described
    tokens = wanted.length + 1 + (wanted.count - 1) * wanted.stride
    text = read_text(folder, data, seq_len, path, tokens - 1, 1)
    return text.tokens_BT[0].unfold(0, wanted.length + 1, wanted.stride), f"windows of: {text.described}"


def measure(
    model: LoadedModel,
    wanted: PerplexityOf,
    rows_BT: Tensor,
    described: str,
    records: Lines,
    batch: int,
    moved: Callable,
) -> None:
    """Score all rows that have no line in `records`, and add their lines. All processes call this together.

    A batch has `batch` rows; in each turn, every model replica scores one batch. After each turn `moved` is called with
    (number of rows scored so far, number of rows to score).
    """
    missing = [index for index in range(len(rows_BT)) if wanted.key(index) not in records]
    for first in range(0, len(missing), batch * model.replicas):
        turn_indices = missing[first : first + batch * model.replicas]
        own_indices = turn_indices[model.replica * batch :][:batch]
        if own_indices:
            lines = score_rows(model, wanted, rows_BT, own_indices, described)
        else:
            lines = []
        records.add(everyone(model, lines))
        moved(first + len(turn_indices), len(missing))


def score_rows(
    model: LoadedModel, wanted: PerplexityOf, rows_BT: Tensor, indices: Sequence[int], described: str
) -> list[Line]:
    """Score a batch of rows; return for each row a line with the summed -log q (`nats`), tokens and bytes.

    If `wanted.score` is `new`, only a window's last `wanted.stride` tokens count, except in the first window.
    """
    tokens_BT = rows_BT[list(indices)]
    chunk = fitting_chunk(model.arch, len(indices), model.read.context.size)
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
