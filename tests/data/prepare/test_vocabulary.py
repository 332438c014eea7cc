"""The token at the end of documents, and tokenizers that can't be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hybridtron.data.prepare.documents import ArgumentError
from hybridtron.data.prepare.embedded import END_OF_TEXT
from hybridtron.data.prepare.input_files import find
from hybridtron.data.prepare.parts import FolderSettings
from hybridtron.data.prepare.prepare_folder import prepare
from hybridtron.data.prepare.vocabulary import open_vocabulary, vocabulary_of
from tests.data.prepare.preparing import (
    TEXTS,
    all_documents,
    words,
    write_jsonl,
    write_tokenizer,
)
from tests.refusals import raises_code


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_truncation_of_a_tokenizer_file_is_ignored(tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    expected = tokenizer.encode(TEXTS[0]).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    vocabulary = vocabulary_of(tokenizer.to_str(), "cutting", END_OF_TEXT)
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:1])
    folder = prepare(
        find([str(tmp_path / "a.jsonl")]).inputs, tmp_path / "out", vocabulary, FolderSettings(validation=0)
    )
    assert all_documents(folder) == [[*expected, vocabulary.eos]]


def test_eos_and_separator_come_from_the_configurations(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "named"
    shutil.copytree(tokenizer_folder, folder)
    assert open_vocabulary(folder).eos_token == END_OF_TEXT
    assert open_vocabulary(folder / "tokenizer.json") == open_vocabulary(folder)
    assert open_vocabulary(folder).name == "named"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<end>", "<start>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}, "bos_token": None}))
    vocabulary = open_vocabulary(folder)
    assert (vocabulary.eos_token, vocabulary.eos, vocabulary.separator) == (
        "<end>",
        tokenizer.token_to_id("<end>"),
        vocabulary.eos,
    )
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<end>", "bos_token": "<start>"}))
    assert open_vocabulary(folder).separator == tokenizer.token_to_id("<start>")
    assert open_vocabulary(folder, separator="<end>").separator == tokenizer.token_to_id("<end>")
    assert open_vocabulary(folder, END_OF_TEXT).eos == tokenizer.token_to_id(END_OF_TEXT)
    with raises_code(ArgumentError, "unknown-name", "--eos", "'<none>'", "<|endof"):
        open_vocabulary(folder, "<none>")


def test_unusable_tokenizers_are_refused(tmp_path: Path) -> None:
    with raises_code(ArgumentError, "no-file", "meta-llama/Llama-2-7b"):
        open_vocabulary(Path("meta-llama/Llama-2-7b"))
    with raises_code(ArgumentError, "no-file", "tokenizer.json"):
        open_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with raises_code(ArgumentError, "unreadable", "tokenizer.json"):
        open_vocabulary(tmp_path)
    with raises_code(ArgumentError, "missing", "--eos"):
        words(300, eos="the end")
    tokenizer = Tokenizer(WordLevel({"a": 0, "</s>": 1}, "a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_tokens(["</s>"])
    with raises_code(ArgumentError, "unsupported", "'</s>'"):
        vocabulary_of(tokenizer.to_str(), "plain", None)


def test_the_vocabulary_reaches_to_the_largest_id() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "</s>": 9}, "a"))
    tokenizer.pre_tokenizer = Whitespace()
    assert vocabulary_of(tokenizer.to_str(), "gaps", None).size == 10


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, "\x00", "[]"], ids=len)
def test_a_hostile_tokenizer_is_an_argument_error(text: str, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        write_tokenizer(tmp_path)
        (tmp_path / name).write_text(text)
        if name == "tokenizer.json" or text != "[]":
            with pytest.raises(ArgumentError):
                open_vocabulary(tmp_path)
        (tmp_path / name).unlink()


def test_irregular_and_huge_tokenizer_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(ArgumentError):
        open_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    write_tokenizer(tmp_path)
    monkeypatch.setattr("hybridtron.data.prepare.vocabulary.MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(ArgumentError):
        open_vocabulary(tmp_path)
