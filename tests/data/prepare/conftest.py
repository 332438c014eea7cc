"""A tokenizer, and inputs of several formats, for tests of preparation."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtron.data.prepare.vocabulary import Vocabulary, open_vocabulary
from tests.data.prepare.preparing import write_inputs, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def vocabulary(tokenizer_folder: Path) -> Vocabulary:
    return open_vocabulary(tokenizer_folder)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return write_inputs(tmp_path / "in")
