"""Spans of documents -> the rows of a step, as arrays; and what a batch derives from them.

A row holds T = L + 1 tokens: L inputs, and the label of the last. Everything else of a batch is arithmetic on four
arrays, so that torch (here) and DALI (`dali.py`) make the same batches from the same rows:

    tokens    = tokens[:, :-1]                            labels = tokens[:, 1:]
    mask      = (documents[:, :-1] == documents[:, 1:]) & learned[:, 1:]
    positions = base[:, :-1] + the place in the row

The mask of a token says whether it is learned as a label, so that it counts at the position before it. Under `join` a
row is one document: documents are all 0, and the base is the same throughout.

Letters: B rows, L input tokens a row, T = L + 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hybridtron.config.schema import Documents
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.data.mds.store import DocumentStore
from hybridtron.data.order.stream import RowSpans


class RowArrays(NamedTuple):
    """The rows of a step.

    documents_BT counts the documents of a row from 0; base_BT is a token's position in its document less its place in
    the row. learned_BT: whether a token is learned; all are where the sources have no masks. continues_B: whether a
    row's first token follows the last one that its lane read.
    """

    tokens_BT: np.ndarray
    documents_BT: np.ndarray
    base_BT: np.ndarray
    learned_BT: np.ndarray
    continues_B: np.ndarray


def gather(sources: Sequence[DocumentStore], rows: Sequence[RowSpans], dtype: np.dtype, joined: bool) -> RowArrays:
    """Read the tokens of rows that are all of one length; each is below the vocabulary's size."""
    length = sum(span.count for _, span in rows[0].spans)
    tokens_BT = np.empty((len(rows), length), dtype)
    documents_BT, base_BT = np.zeros((2, len(rows), length), np.int32)
    learned_BT, masked = np.ones((len(rows), length), np.bool_), any(source.masked for source in sources)
    for b, row in enumerate(rows):
        counts = [span.count for _, span in row.spans]
        np.concatenate(
            [sources[source].read(*span) for source, span in row.spans], out=tokens_BT[b], casting="same_kind"
        )
        if masked:
            np.concatenate([sources[source].read_mask(*span) for source, span in row.spans], out=learned_BT[b])
        if joined:
            base_BT[b] = row.position
        else:
            starts = [0, *itertools.accumulate(counts[:-1])]
            documents_BT[b] = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
            base_BT[b] = np.repeat(np.array([row.position, *(-start for start in starts[1:])], np.int32), counts)
    if tokens_BT.max() >= min(source.vocab_size for source in sources):
        for source, span in itertools.chain.from_iterable(row.spans for row in rows):
            sources[source].check(*span)
    return RowArrays(tokens_BT, documents_BT, base_BT, learned_BT, np.array([row.position > 0 for row in rows]))


def batch_of(rows: RowArrays, documents: Documents) -> Batch:
    """The batch of rows, on the CPU."""
    documents_BL = rows.documents_BT[:, :-1].copy()
    tokens_BL, labels_BL = rows.tokens_BT[:, :-1].astype(np.int64), rows.tokens_BT[:, 1:].astype(np.int64)
    positions_BL = rows.base_BT[:, :-1] + np.arange(documents_BL.shape[1])
    mask_BL = (documents_BL == rows.documents_BT[:, 1:]) & rows.learned_BT[:, 1:]
    seq = SeqInfo(
        torch.from_numpy(positions_BL), torch.from_numpy(documents_BL) if documents is Documents.isolate else None
    )
    tokens, labels, mask, continues = map(torch.from_numpy, (tokens_BL, labels_BL, mask_BL, rows.continues_B))
    return Batch(tokens, labels, mask, seq, continues)
