"""Reads the tokens of a step's rows, and computes the batch from these rows.

A row holds T = L + 1 tokens: L inputs, and the label for the last input. `gather` reads rows as `RowArrays`, and
`batch_of` computes the batch from the arrays in numpy. `dali.py` computes the same batch with DALI:

    tokens    = tokens[:, :-1]
    labels    = tokens[:, 1:]
    mask      = (documents[:, :-1] == documents[:, 1:]) & learned[:, 1:]
    positions = base[:, :-1] + the index in the row

The mask is True where the label belongs to the input's document and counts in the loss. With `data.documents=join`, a
row counts as one document, so all entries of `documents` are 0, and `base` is constant in a row.

Suffixes in array names give the axes: B rows, L input tokens in a row, T = L + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hybridtron.config.schema import Documents
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.data.mds.store import DocumentStore
from hybridtron.data.order.stream import RowSpans


class RowArrays(NamedTuple):
    """A step's rows.

    documents_BT: each token's document index in its row, from 0
    base_BT: a token's position in its document minus its index in the row
    learned_BT: whether a token counts in the loss when it is a label; True for all tokens if no source has loss masks
    continues_B: whether a row continues the last document of the previous step's row at the same batch index
    """

    tokens_BT: np.ndarray
    documents_BT: np.ndarray
    base_BT: np.ndarray
    learned_BT: np.ndarray
    continues_B: np.ndarray


def gather(sources: Sequence[DocumentStore], rows: Sequence[RowSpans], dtype: np.dtype, joined: bool) -> RowArrays:
    """Read tokens for rows with equal length; raise DataError if a token id is beyond the vocabulary.

    sources: each source's document store, in the order in which spans number the sources
    joined: whether a row counts as one document
    """
    spans = [source_span for row in rows for source_span in row.spans]
    counts = np.array([span.count for _, span in spans])
    length = int(counts.sum()) // len(rows)
    tokens_BT = np.empty((len(rows), length), dtype)
    tokens_by_span = [sources[source].read(*span) for source, span in spans]
    np.concatenate(tokens_by_span, out=tokens_BT.reshape(-1), casting="same_kind")
    learned_BT = np.ones((len(rows), length), np.bool_)
    if any(source.masked for source in sources):
        masks = [sources[source].read_mask(*span) for source, span in spans]
        np.concatenate(masks, out=learned_BT.reshape(-1))
    first = np.array([row.position for row in rows])
    if joined:
        documents_BT, base_BT = np.zeros((2, len(rows), length), np.int32)
        base_BT += first[:, None]
    else:
        documents_BT, base_BT = _document_indices(np.array([len(row.spans) for row in rows]), counts, first, length)
    if tokens_BT.max() >= min(source.vocab_size for source in sources):
        for source, span in spans:
            sources[source].check(*span)
    return RowArrays(tokens_BT, documents_BT, base_BT, learned_BT, first > 0)


def _document_indices(
    spans_B: np.ndarray, counts: np.ndarray, first_B: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return documents_BT and base_BT for `RowArrays`.

    spans_B: how many spans each row has
    counts: how many tokens each span has, over all rows
    first_B: position that each row's first token has in its document
    length: how many tokens a row has

    Only the first span in a row may continue a document. Every other span starts a document at some index p of its row,
    so its tokens have base -p.
    """
    begins_B = np.cumsum(spans_B) - spans_B
    documents = np.arange(len(counts)) - begins_B.repeat(spans_B)
    base = (np.arange(len(spans_B)) * length).repeat(spans_B) - (np.cumsum(counts) - counts)
    base[begins_B] = first_B
    documents_BT, base_BT = (values.astype(np.int32).repeat(counts).reshape(-1, length) for values in (documents, base))
    return documents_BT, base_BT


def batch_of(rows: RowArrays, documents: Documents) -> Batch:
    """Compute the batch from these rows, on the CPU."""
    documents_BL = rows.documents_BT[:, :-1].copy()
    tokens_BL = rows.tokens_BT[:, :-1].astype(np.int64)
    labels_BL = rows.tokens_BT[:, 1:].astype(np.int64)
    positions_BL = rows.base_BT[:, :-1] + np.arange(documents_BL.shape[1])
    mask_BL = (documents_BL == rows.documents_BT[:, 1:]) & rows.learned_BT[:, 1:]
    seq = SeqInfo(
        torch.from_numpy(positions_BL), torch.from_numpy(documents_BL) if documents is Documents.isolate else None
    )
    tokens, labels, mask, continues = map(torch.from_numpy, (tokens_BL, labels_BL, mask_BL, rows.continues_B))
    return Batch(tokens, labels, mask, seq, continues)
