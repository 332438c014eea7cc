"""The embedded corpus, with a few documents in place of the standard library."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from hybridtron.data.folder import FolderError
from hybridtron.data.prepare import corpus
from hybridtron.data.prepare.documents import ArgumentError, Document, in_validation
from hybridtron.data.prepare.embedded import END_OF_TEXT, SETTINGS, prepare_embedded, train_tokenizer
from hybridtron.data.prepare.progress import PrepareProgress
from tests.data.prepare.preparing import stored
from tests.refusals import raises_code

TEXTS = [
    "def main() -> None:\n\tprint('naïve café ☕')\n\n\n",
    "Eight bits: " + "".join(map(chr, range(256))) * 3,
    f"A text that spells {END_OF_TEXT} continues behind it.\r\n  Two  spaces.",
    "日本語のテキスト " * 5,
    " leading and trailing space ",
]


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    sources = ("text", "code")
    chosen = [Document(TEXTS[i % len(TEXTS)] + str(i), sources[i % 2], f"topics/{i:02}") for i in range(60)]
    monkeypatch.setattr(corpus, "documents", lambda: chosen)
    return chosen


def test_embedded_tokens_decode_to_the_source(documents: list[Document], tmp_path: Path):
    folder = prepare_embedded(tmp_path / "data", 400)
    tokenizer = Tokenizer.from_file(str(folder.tokenizer_file))
    eos = tokenizer.token_to_id(END_OF_TEXT)
    assert folder.manifest.eos == eos
    assert set(folder.manifest.splits["train"]) == {"code", "text"}
    for split, sources in folder.manifest.splits.items():
        for source in sources:
            decoded = []
            for *text, last in stored(folder, split, source):
                assert last == eos
                assert eos not in text
                decoded.append(tokenizer.decode(text, skip_special_tokens=False))
            held_out = split == "validation"
            of_source = [d.content for d in documents if d.source == source]
            assert decoded == [text for text in of_source if in_validation(text, 0.05) == held_out]


def test_the_vocabulary_is_trained_without_held_out_texts(documents: list[Document], tmp_path: Path):
    held_out = [d.content for d in documents if in_validation(d.content, 0.05)]
    training = [d.content for d in documents if d.content not in held_out]
    assert 0 < len(held_out) < 10
    folder = prepare_embedded(tmp_path / "data", 400)
    assert folder.tokenizer_file.read_text() == train_tokenizer(training, 400).to_str()


def test_manifest_describes_the_real_vocabulary(documents: list[Document], tmp_path: Path):
    folder = prepare_embedded(tmp_path / "data", 30_000)
    assert 300 < folder.manifest.vocab_size < 30_000
    assert folder.manifest.vocab_size == Tokenizer.from_file(str(folder.tokenizer_file)).get_vocab_size()
    origin = folder.manifest.origin
    assert (origin["corpus"], origin["asked_vocab_size"]) == ("embedded", 30_000)
    assert origin["python"] == platform.python_version()


def test_an_existing_folder_is_not_prepared_again(
    documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = prepare_embedded(tmp_path / "data", 400)
    monkeypatch.setattr(corpus, "documents", lambda: pytest.fail("read again"))
    assert prepare_embedded(tmp_path / "data", 400) == folder


def test_simultaneous_preparations_write_one_folder(documents: list[Document], tmp_path: Path):
    alone = prepare_embedded(tmp_path / "alone", 400)
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda _: prepare_embedded(tmp_path / "data", 400), range(3)))
    assert {folder.digest for folder in together} == {alone.digest}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "data"]


def test_sources_of_packages_are_more_sources(documents: list[Document], tmp_path: Path):
    """Each file of a package is a document, held out or not like any other, and also trains the vocabulary."""
    folder = prepare_embedded(tmp_path / "data", 400, ["json", "tokenizers"], workers=2)
    assert set(folder.manifest.splits["train"]) == {"code", "text", "json", "tokenizers"}
    files = sorted(file.relative_to(corpus.folder_of("json")) for file in corpus.folder_of("json").glob("*.py"))
    assert [document.where for document in corpus.packaged(corpus.folder_of("json"))] == [f"json/{f}" for f in files]
    splits = folder.manifest.splits
    assert sum(len(folder.lengths(split, "json")) for split in splits if "json" in splits[split]) == len(files)
    assert folder.manifest.origin["tokenizers"] == metadata.version("tokenizers")
    assert folder.manifest.origin["json"] == "Python's"
    alone = prepare_embedded(tmp_path / "alone", 400)
    assert folder.tokenizer_file.read_text() != alone.tokenizer_file.read_text()


def test_progress_counts_the_bytes_of_the_texts(
    documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Neither the corpus nor a package is a file whose size is known."""
    moved = []
    monkeypatch.setattr(PrepareProgress, "advance", lambda self, size, tokens: moved.append((size, self.bar.tasks[0])))
    prepare_embedded(tmp_path / "data", 400, ["json"])
    sources = sum(file.stat().st_size for file in corpus.folder_of("json").glob("*.py"))
    whole = sources + sum(len(str(document.content).encode()) for document in documents)
    assert (sum(size for size, _ in moved), {bar.total for _, bar in moved}) == (whole, {whole})


def test_a_folder_with_other_files_is_left_alone(documents: list[Document], tmp_path: Path):
    (tmp_path / "mine.txt").write_text("my text")
    with raises_code(FolderError, "unreadable", "manifest"):
        prepare_embedded(tmp_path, 400)
    assert (tmp_path / "mine.txt").exists()


def test_a_vocabulary_below_300_entries_is_refused(tmp_path: Path):
    with raises_code(ArgumentError, "out-of-range", "299", "300"):
        prepare_embedded(tmp_path / "data", 299)


def test_documents_of_the_standard_library_are_sorted_and_named():
    documents = corpus.documents()
    names = [d.where for d in documents]
    assert names == sorted(set(names))
    assert {"topics/assert", "lib/argparse.py", "lib/json/decoder.py"} <= set(names)
    assert not [n for n in names if "/test/" in n or "site-packages" in n or n == "lib/pydoc_data/topics.py"]
    assert {(d.where.split("/")[0], d.source) for d in documents} == {("topics", "text"), ("lib", "code")}
    assert 0.03 < sum(in_validation(d.content, SETTINGS.validation) for d in documents) / len(names) < 0.09


def test_empty_files_and_other_encodings_are_skipped(tmp_path: Path):
    (tmp_path / "good.py").write_text("x = 'é'\n", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("x = 'é'\n".encode("latin-1"))
    (tmp_path / "empty.py").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("pass")
    assert list(corpus._sources(tmp_path, "lib", "code")) == [Document("x = 'é'\n", "code", "lib/good.py")]
