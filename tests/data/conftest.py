"""A toy split in which every token but eos is its own, so that a token tells its document and its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybridtron.data.folder import TokenFolder, write_folder

EOS = 0
LENGTHS = (7, 1, 30, 2, 13, 5, 64, 3, 3, 22, 9, 41)  # without eos; 200 tokens and 12 eos


def toy_documents(lengths: tuple[int, ...]) -> list[np.ndarray]:
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) + 1 for end, length in zip(ends, lengths, strict=True)]


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., TokenFolder]:
    def make(
        train: tuple[int, ...] = LENGTHS, validation: tuple[int, ...] = (11, 4, 25), name: str = "toy", vocab: int = 999
    ) -> TokenFolder:
        splits = {"train": toy_documents(train), "validation": toy_documents(validation)}
        return write_folder(tmp_path / name, splits, "{}", vocab, EOS, {"corpus": "toy"})

    return make


@pytest.fixture
def toy(make_folder: Callable[..., TokenFolder]) -> TokenFolder:
    return make_folder()
