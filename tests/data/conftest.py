"""Toy sources with unique tokens (but for eos), so that a token identifies its document and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from hybridtron.data.folder import TokenFolder
from hybridtron.data.mixture_spec import MixtureSource
from hybridtron.data.prepare.writer import write_folder
from hybridtron.data.sources import Sources
from hybridtron.storage.cache import CacheOptions

EOS = 0
LENGTHS = (7, 1, 30, 2, 13, 5, 64, 3, 3, 22, 9, 41)  # without eos; 200 tokens and 12 eos


def toy_documents(lengths: Sequence[int], first: int = 1) -> list[np.ndarray]:
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) + first for end, length in zip(ends, lengths, strict=True)]


def learned(tokens: np.ndarray) -> np.ndarray:
    """Return the mask of learned tokens in a masked toy: every third token and eos. So a label implies its mask."""
    return tokens % 3 == 0


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., TokenFolder]:
    def make(
        train: Sequence[int] = LENGTHS,
        validation: Sequence[int] = (11, 4, 25),
        name: str = "toy",
        vocab: int = 999,
        shard_size: int = 400,
        compression: str | None = None,
        masked: bool = False,
        first: int = 1,
    ) -> TokenFolder:
        documents_by_split = {"train": toy_documents(train, first), "validation": toy_documents(validation, first)}
        splits = {split: {"text": documents} for split, documents in documents_by_split.items()}
        masks = {
            split: {"text": [learned(np.append(document, EOS)) for document in of["text"]]}
            for split, of in splits.items()
        }
        path = tmp_path / name
        masks_if_masked = masks if masked else None
        return write_folder(path, splits, "{}", vocab, EOS, {"corpus": "toy"}, shard_size, compression, masks_if_masked)

    return make


@pytest.fixture
def toy(make_folder: Callable[..., TokenFolder]) -> TokenFolder:
    return make_folder()


def sources_of(*ingredients: tuple[TokenFolder, str, float]) -> Sources:
    """Sources named a, b, c...; each a folder, a source in it, and a weight."""
    folder = ingredients[0][0]
    named = [MixtureSource(chr(97 + i), *ingredient) for i, ingredient in enumerate(ingredients)]
    return Sources(named, CacheOptions(folder.path.parent / "cache"))
