"""Held-out text for a checkpoint: the beginnings of long documents, or packed documents if none is long enough.

The text must have been prepared with the tokenizer in the checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtron.config.resolve import resolve
from hybridtron.evaluate.served import opened, whole_model
from hybridtron.problems import Unusable

if TYPE_CHECKING:
    from torch import Tensor

    from hybridtron.config.schema import Config, DataConfig
    from hybridtron.data.mds.store import DocumentStore
    from hybridtron.data.order.stream import RowSpans
    from hybridtron.data.sources import Sources
    from hybridtron.model.lm import LanguageModel


@dataclass(frozen=True)
class Text:
    """Rows to read with length + 1 tokens (B, T), their description in words, and the model's training length."""

    tokens_BT: Tensor
    described: str
    length: int
    seq_len: int


def trained_model(checkpoint: Path, seq_len: int | None) -> tuple[LanguageModel, Config, int]:
    """Load a checkpoint's full model; return it with its configuration and training length.

    The configuration has the data from the phase in which the checkpoint was written.
    """
    stored_checkpoint, config = opened(checkpoint)
    config, seq_len = as_trained(checkpoint, config, stored_checkpoint.meta.step, seq_len)
    return whole_model(stored_checkpoint, config), config, seq_len


def as_trained(checkpoint: Path, config: Config, step: int, seq_len: int | None) -> tuple[Config, int]:
    """Return the configuration with the data from a step's phase, and that phase's row length.

    `seq_len` overrides the row length. Raises Unusable for an imported checkpoint if it is None.
    """
    if phases := resolve(config):
        phase = next((candidate for candidate in phases if step <= candidate.end_step), phases[-1])
        return replace(config, data=phase.data), seq_len or phase.settings.seq_len
    if seq_len is None:
        raise Unusable(
            f"{checkpoint} was imported and does not say how it was trained: give --seq-len, and --data", code="missing"
        )
    return config, seq_len


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
            raise FolderError(other_folders[0].name, f"was made with another tokenizer than {checkpoint} holds")
        stores = sources.stores("validation")
        chosen_rows, described = choose_rows(stores, length, rows)
        tokens_BT = gather(stores, chosen_rows, sources.dtype, joined=True).tokens_BT
    except (FolderError, DataError) as error:
        if path:
            cure = "--data PATH names other prepared tokens"
        else:
            cure = "--data PATH says where the run's data is now"
        raise Unusable(f"{error}; {cure}", code="unreadable") from error
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
    """Open the sources that the run read, or all sources with held-out documents in another prepared folder."""
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
    """Choose up to `rows` rows with length + 1 tokens, from the sources in turn, and describe them in words.

    Each row begins a document that is long enough. If there is none, rows are cut from packed documents. Raises
    Unusable if no source holds out enough tokens for a row.
    """
    import numpy as np

    from hybridtron.data.order.stream import DocumentStream, RowSpans, Span

    long_documents = [np.flatnonzero(store.lengths > length)[:rows].tolist() for store in stores]
    spans_of_sources = [[[Span(document, 0, length + 1)] for document in documents] for documents in long_documents]
    kind = f"long documents of the validation split, the first {length} tokens of each"
    if not any(spans_of_sources):
        kind = f"rows of {length} tokens, from the validation split packed end to end: none of its documents is as long"
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
            f"a row takes {length + 1} tokens, no source holds out more than {most}: take fewer by --length",
            code="does-not-fit",
        )
    return row_spans, f"{len(row_spans)} {kind}" + (f" ({rows} were asked for)" if len(row_spans) < rows else "")
