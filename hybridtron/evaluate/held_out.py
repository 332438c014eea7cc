"""Held-out text for a checkpoint: the beginnings of long documents, or packed documents if all are too short.

The text is read from a prepared folder, whose tokens must have been made with the checkpoint's tokenizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtron.config.resolve import RunPlan
from hybridtron.evaluate.loaded_model import open_checkpoint, whole_model
from hybridtron.problems import Code, Unusable

if TYPE_CHECKING:
    from torch import Tensor

    from hybridtron.config.schema import Config, DataConfig
    from hybridtron.data.mds.store import DocumentStore
    from hybridtron.data.order.stream import RowSpans
    from hybridtron.data.sources import Sources
    from hybridtron.model.lm import LanguageModel


@dataclass(frozen=True)
class Text:
    """Held-out rows for instruments and perplexities.

    tokens_BT: B rows with T = length + 1 tokens
    described: the rows, described in words
    length: tokens that the model reads in each row; the last token is only predicted
    seq_len: the model's training length
    """

    tokens_BT: Tensor
    described: str
    length: int
    seq_len: int


def trained_model(checkpoint: Path, seq_len: int | None) -> tuple[LanguageModel, Config, int]:
    """Load a checkpoint's full model. Returns the model, its configuration and its training length.

    The configuration's `data` section is from the training phase in which the checkpoint was written.
    """
    stored_checkpoint = open_checkpoint(checkpoint)
    plan = stored_checkpoint.plan
    data, seq_len = as_trained(checkpoint, plan, stored_checkpoint.meta.step, seq_len)
    return whole_model(stored_checkpoint, plan.arch), replace(plan.config, data=data), seq_len


def as_trained(checkpoint: Path, plan: RunPlan, step: int, seq_len: int | None) -> tuple[DataConfig, int]:
    """Return the data settings and the training length of the phase that a step belongs to.

    If `seq_len` is given, it is returned as the training length. Raises Unusable if `seq_len` is None and the
    checkpoint was imported: such a checkpoint has no phases.
    """
    if plan.phases:
        phase = plan.phase_ending_at(step)
        return phase.data, seq_len or phase.settings.seq_len
    if seq_len is None:
        raise Unusable(
            f"{checkpoint} was imported, so its training length and data are unknown: give --seq-len and --data",
            code="missing",
        )
    return plan.config.data, seq_len


def read_text(checkpoint: Path, data: DataConfig, seq_len: int, path: str | None, length: int, rows: int) -> Text:
    """Read held-out rows from the run's data, or from another prepared folder (`path`).

    Raises Unusable if the data is missing, too short, or made with another tokenizer.
    """
    import torch

    from hybridtron.data.folder import FolderError
    from hybridtron.data.mds.store import DataError
    from hybridtron.data.rows import gather
    from hybridtron.storage.digest import digest_of

    try:
        sources = open_sources(data, path)
        tokenizer = digest_of((checkpoint / "tokenizer.json").read_bytes())
        if other_folders := [
            source.folder for source in sources.mixture if source.folder.manifest.tokenizer != tokenizer
        ]:
            fault = f"was prepared with another tokenizer than that of {checkpoint}"
            raise FolderError(other_folders[0].name, fault, code="mismatch")
        stores = sources.stores("validation")
        chosen_rows, described = choose_rows(stores, length, rows)
        tokens_BT = gather(stores, chosen_rows, sources.dtype, joined=True).tokens_BT
    except (FolderError, DataError) as error:
        if path:
            cure = "give another prepared folder with --data PATH"
        else:
            cure = "give the path of a prepared folder with --data PATH"
        code: Code = "unreadable"
        if isinstance(error, FolderError):
            code = error.code
        raise Unusable(f"{error}; {cure}", code=code) from error
    return Text(torch.from_numpy(tokens_BT.astype("int64")), described, length, seq_len)


def digest_of_data(data: DataConfig, path: str) -> str:
    """Return a prepared folder's digest. Raises Unusable if it can't be opened."""
    from hybridtron.data.folder import FolderError
    from hybridtron.data.mds.opening import open_folder
    from hybridtron.data.sources import cache_options

    try:
        return open_folder(path, cache_options(data)).digest
    except FolderError as error:
        raise Unusable(f"--data: {error}", code=error.code) from error


def open_sources(data: DataConfig, path: str | None) -> Sources:
    """Open the run's data sources.

    If `path` is given, open instead all sources with held-out documents in that prepared folder.
    """
    from hybridtron.data.mds.opening import open_folder
    from hybridtron.data.mixture_spec import MixtureSource, mixture_of
    from hybridtron.data.sources import Sources, cache_options

    cache = cache_options(data)
    if path is None:
        return Sources(mixture_of(data, lambda name: open_folder(name, cache)), cache)
    folder = open_folder(path, cache)
    held_out = folder.manifest.splits["validation"].items()
    return Sources([MixtureSource(name, folder, name, float(split.tokens)) for name, split in held_out], cache)


def choose_rows(stores: Sequence[DocumentStore], length: int, rows: int) -> tuple[list[RowSpans], str]:
    """Choose up to `rows` rows of length + 1 tokens. Returns the rows, and a description of the rows in words.

    Rows are taken from all sources in turn. Each row is the beginning of a document with at least length + 1 tokens. If
    there is no such document, rows are cut from concatenated documents. Raises Unusable if no source has enough
    held-out tokens for a row.
    """
    import numpy as np

    from hybridtron.data.order.stream import DocumentStream, RowSpans, Span

    long_documents = [np.flatnonzero(store.lengths > length)[:rows].tolist() for store in stores]
    spans_of_sources = [[[Span(document, 0, length + 1)] for document in documents] for documents in long_documents]
    kind = f"long documents of the validation split, the first {length} tokens of each"
    if not any(spans_of_sources):
        kind = f"rows of {length} tokens, from the validation split packed end to end: no document there is as long"
        streams = [DocumentStream(store) for store in stores]
        starts = range(0, rows * (length + 1), length + 1)
        spans_of_sources = [
            [stream.spans(start, length + 1) for start in starts if start + length < stream.tokens_per_epoch]
            for stream in streams
        ]
    turns = itertools.chain.from_iterable(map(enumerate, itertools.zip_longest(*spans_of_sources)))
    row_spans = [RowSpans([(source, span) for span in spans], 0) for source, spans in turns if spans is not None][:rows]
    if not row_spans:
        most = max((int(store.shard_tokens.sum()) for store in stores), default=0)
        raise Unusable(
            f"a row needs {length + 1} tokens, but no source has more than {most} held-out tokens: lower --length",
            code="does-not-fit",
        )
    return row_spans, f"{len(row_spans)} {kind}" + (f" ({rows} were asked for)" if len(row_spans) < rows else "")
