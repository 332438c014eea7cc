"""Haystacks, the texts in which facts are hidden: one repeated line (NOISE), or an essay from one of these providers.

    synthetic    sentences made from word lists; needs no corpus
    files:DIR    all .txt and .md files below a folder, ordered by path
    shards:DIR   held-out documents of a prepared folder, with at least 20 words

Scores with different providers are not comparable, so each sample names its provider. Sentences that could be mistaken
for a needle ("special magic", or a 7-digit number) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from hybridtron.data.folder import FolderError, TokenFolder
from hybridtron.data.mds.store import DataError, DocumentStore
from hybridtron.data.tokenizer_file import read_tokenizer
from hybridtron.regular_files import Unreadable, read_regular
from hybridtron.storage.cache import CacheOptions
from hybridtron.tasks.base import TaskError
from hybridtron.tasks.words import sentences

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SYNTHETIC = "synthetic"
SYNTHETIC_SENTENCES = 20000
LARGEST_FILE = 2**28  # bytes of one file
LARGEST_CORPUS = 2**28  # characters after which no more of a corpus is read
CACHE = Path("data/cache")  # for decompressed shards; the default of the key `data.cache`
SHORTEST_DOCUMENT = 20  # words
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(]?[A-Z0-9])")
LIKE_A_NEEDLE = re.compile(r"special magic|\d{7}", re.IGNORECASE)


def essay(provider: str, count: int) -> list[str]:
    """Return the first `count` words of a corpus, repeated if it has fewer. Raises TaskError if it can't be read."""
    if provider != SYNTHETIC:
        words = _words(provider, 0)
    else:
        words = _words(provider, 1 << max(count, 1).bit_length())
    repeats = -(-count // len(words))
    return (words * repeats)[:count]


def corpus_sentences(provider: str) -> list[str]:
    """Return all sentences of a corpus; for the synthetic provider, SYNTHETIC_SENTENCES generated ones."""
    if provider == SYNTHETIC:
        return list(islice(sentences(), SYNTHETIC_SENTENCES))
    return split_sentences(" ".join(_words(provider, 0)))


def split_sentences(text: str) -> list[str]:
    """Split a text at white space between the end of a sentence and a capital letter or digit."""
    return [part for part in SENTENCE_END.split(text) if part]


@cache
def _words(provider: str, enough: int) -> list[str]:
    """Return a corpus's words, without needle-like sentences; the synthetic corpus gives `enough` words."""
    if provider == SYNTHETIC:
        generated_words = (word for sentence in sentences() for word in sentence.split())
        return list(islice(generated_words, enough))
    kind, _, place = provider.partition(":")
    readers = {"files": _files, "shards": _shards}
    if kind not in readers or not place:
        raise TaskError(f"essay={provider}: must be {SYNTHETIC}, files:DIR or shards:DIR", code="malformed")
    words: list[str] = []
    num_characters = 0
    for text in readers[kind](Path(place)):
        words += [word for part in split_sentences(" ".join(text.split())) if usable(part) for word in part.split()]
        num_characters += len(text)
        if num_characters > LARGEST_CORPUS:
            break
    if not words:
        raise TaskError(f"essay={provider}: has no text", code="missing")
    return words


def usable(sentence: str) -> bool:
    """Check that a sentence can't be mistaken for a needle."""
    return not LIKE_A_NEEDLE.search(sentence)


def _files(folder: Path) -> Iterator[str]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md"))
    if not files:
        if folder.is_dir():
            reason = "has no .txt or .md file"
        else:
            reason = "is not a folder"
        raise TaskError(
            f"essay=files:{folder}: {folder} {reason}; without a corpus, essay={SYNTHETIC} works", code="no-file"
        )
    for file in files:
        try:
            yield read_regular(file, LARGEST_FILE).decode()
        except (Unreadable, OSError, UnicodeDecodeError) as error:
            raise TaskError(
                f"essay=files:{folder}: {file} can't be read as UTF-8: {error}", code="unreadable"
            ) from error


def _shards(path: Path) -> Iterator[str]:
    try:
        folder = TokenFolder.open(path)
        tokenizer = read_tokenizer(folder.tokenizer_file.read_text())
        for source in sorted(folder.manifest.splits["validation"]):
            store = DocumentStore(folder, "validation", source, CacheOptions(CACHE))
            for document in range(len(store.lengths)):
                text = tokenizer.decode(
                    store.read(document, 0, int(store.lengths[document]) - 1).tolist()
                )  # without eos
                if len(text.split()) >= SHORTEST_DOCUMENT:
                    yield text
    except (FolderError, DataError, OSError) as error:
        raise TaskError(
            f"essay=shards:{path}: {error}; without a corpus, essay={SYNTHETIC} works", code="unreadable"
        ) from error
