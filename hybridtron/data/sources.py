"""The opened sources of a phase: their document stores, their weights, and their common tokenizer.

A source is a named part of a folder with prepared tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import DataConfig, Source
from hybridtron.config.units import parse_bytes
from hybridtron.data.folder import FolderError, TokenFolder
from hybridtron.data.mds.opening import open_folder
from hybridtron.data.mds.store import DocumentStore
from hybridtron.data.mixture_spec import MixtureSource, mixture_of
from hybridtron.data.prepare.embedded import prepare_embedded
from hybridtron.data.problems import content_problems
from hybridtron.problems import ConfigError, Problem
from hybridtron.storage.cache import CacheOptions
from hybridtron.storage.retry import RetryPolicy


class Sources:
    """A phase's sources, in the mixture's order."""

    def __init__(self, mixture: Sequence[MixtureSource], cache: CacheOptions) -> None:
        self.mixture = list(mixture)
        self._cache = cache
        self._stores: dict[str, list[DocumentStore]] = {}

    def __reduce__(self) -> tuple[type[Sources], tuple[list[MixtureSource], CacheOptions]]:
        return Sources, (self.mixture, self._cache)  # without stores, because another process opens its own stores

    @staticmethod
    def open(phase: ResolvedPhase, checked: bool = False) -> Sources:
        """Open the sources that a phase reads; raise ConfigError if they do not fit the phase.

        With `checked`, another process of this machine has just opened them.

        With `data.source=embedded`, the Python installation's text is prepared first if the folder does not exist.
        """
        data = phase.data
        key = phase.key("data.path")
        if data.source == Source.embedded:
            prepare_embedded(Path(data.path), phase.model.vocab_size)
        stage = stage_of(phase)
        cache = cache_options(data, stage)

        @functools.cache
        def opened(path: str) -> TokenFolder:
            return open_folder(path, cache, checked, copied=stage is not None)

        try:
            mixture = mixture_of(data, opened)
        except FolderError as error:
            raise ConfigError([Problem(key, error.code, f"{error}; phase {phase.settings.name} reads it")]) from error
        if problems := content_problems(key, phase, mixture):
            raise ConfigError(problems)
        return Sources(mixture, cache)

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.mixture]

    @property
    def weights(self) -> list[float]:
        return [source.weight for source in self.mixture]

    @property
    def tokenizer_file(self) -> Path:
        """Path of the first source's tokenizer.json. All sources have equal tokenizers."""
        return self.mixture[0].folder.tokenizer_file

    @property
    def tokenizer_digest(self) -> str:
        return self.mixture[0].folder.manifest.tokenizer

    @property
    def eos(self) -> int:
        """Token that ends each document."""
        return self.mixture[0].folder.manifest.eos

    @property
    def chat(self) -> str | None:
        """Chat template with which conversations were prepared, as JSON; None if no source has conversations."""
        stored = (source.folder.manifest.origin.get("chat") for source in self.mixture)
        return next((text for text in stored if isinstance(text, str)), None)

    @property
    def dtype(self) -> np.dtype:
        """Smallest dtype that can hold the tokens from all sources."""
        return np.result_type(*(np.dtype(source.folder.manifest.dtype) for source in self.mixture))

    @property
    def masked(self) -> bool:
        """True if any source has loss masks in its training text."""
        return any(source.learned("train") is not None for source in self.mixture)

    @property
    def documents_per_token(self) -> float:
        """Number of training documents per token, averaged over the sources by weight."""
        splits = [source.folder.manifest.splits["train"][source.source] for source in self.mixture]
        weighted = zip(self.weights, splits, strict=True)
        return sum(weight * split.documents / split.tokens for weight, split in weighted) / sum(self.weights)

    def having(self, split: str) -> list[MixtureSource]:
        """Return the sources that have tokens in a split. In the split `train`, all sources have tokens."""
        return [source for source in self.mixture if source.tokens(split)]

    def stores(self, split: str) -> list[DocumentStore]:
        """Return a document store for each source in `having(split)`. Stores are opened at the first call."""
        if split not in self._stores:
            self._stores[split] = [
                DocumentStore(source.folder, split, source.source, self._cache) for source in self.having(split)
            ]
        return self._stores[split]

    def described(self) -> str:
        """Return the sources' names, digests and weights as one line, for the loader's fingerprint."""
        return ", ".join(
            f"{source.name} {source.folder.digest[:12]}/{source.source} x {source.weight:g}" for source in self.mixture
        )


def stage_of(phase: ResolvedPhase) -> str | None:
    """Return the folder to which a phase's data are copied, or None if they are read in place.

    The embedded corpus is small, and is never copied.
    """
    if phase.data.source == Source.embedded:
        return None
    return phase.config.cluster.stage


def cache_options(data: DataConfig, stage: str | None = None) -> CacheOptions:
    """Return the settings for the cache that holds downloaded, decompressed and copied shards.

    stage: folder for copies of all data; it takes the place of `data.cache`, and has no limit
    """
    patience = RetryPolicy(data.timeout, data.retries)
    if stage is not None:
        return CacheOptions(Path(stage), None, patience, "cluster.stage")
    if data.cache_limit is None:
        limit = None
    else:
        limit = parse_bytes(data.cache_limit)
    return CacheOptions(Path(data.cache), limit, patience)
