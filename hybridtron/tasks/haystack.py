"""Haystacks: the texts in which tasks hide facts (needles).

A haystack is one repeated line (NOISE), or an essay. An essay comes from one of these providers, which the task option
`essay` names:

    synthetic    random sentences made from word lists; needs no corpus
    files:DIR    all .txt and .md files below a folder, ordered by path
    shards:DIR   the held-out documents of a folder written by `hybridtron data prepare`; documents with fewer than 20
                 words are skipped

Scores with different providers are not comparable, so each sample records its provider. Sentences that could be
mistaken for a needle are left out: sentences with "special magic" or a 7-digit number.
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
from hybridtron.safe_open import Unreadable, read_regular
from hybridtron.storage.cache import CacheOptions
from hybridtron.tasks.base import TaskError
from hybridtron.tasks.words import sentences

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SYNTHETIC = "synthetic"
SYNTHETIC_SENTENCES = 20000
MAX_FILE_BYTES = 2**28  # maximum size of a file
MAX_CORPUS_CHARACTERS = 2**28  # once this number of characters is read, the remaining files or documents are not read
CACHE = Path("data/cache")  # for decompressed shards; the default of the key `data.cache`
MIN_DOCUMENT_WORDS = 20  # shorter documents are skipped
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(]?[A-Z0-9])")
LIKE_A_NEEDLE = re.compile(r"special magic|\d{7}", re.IGNORECASE)


def essay(provider: str, count: int) -> list[str]:
    """Return the first `count` words of a corpus, which is repeated if it has fewer words.

    Raises TaskError if the corpus can't be read.
    """
    if provider != SYNTHETIC:
        words = _words(provider, 0)
    else:
        words = _words(provider, 1 << max(count, 1).bit_length())
    repeats = -(-count // len(words))
    return (words * repeats)[:count]


def corpus_sentences(provider: str) -> list[str]:
    """Return all sentences of a corpus. The synthetic corpus has SYNTHETIC_SENTENCES sentences."""
    if provider == SYNTHETIC:
        return list(islice(sentences(), SYNTHETIC_SENTENCES))
    return split_sentences(" ".join(_words(provider, 0)))


def split_sentences(text: str) -> list[str]:
    """Split a text at white space between the end of a sentence and a capital letter or digit."""
    return [part for part in SENTENCE_END.split(text) if part]


@cache
def _words(provider: str, enough: int) -> list[str]:
    """Return the words of a corpus, without sentences that could be mistaken for a needle.

    The synthetic corpus is endless; its first `enough` words are returned. Other corpora ignore `enough`.
    """
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
        if num_characters > MAX_CORPUS_CHARACTERS:
            break
    if not words:
        raise TaskError(f"essay={provider}: has no text", code="missing")
    return words


def usable(sentence: str) -> bool:
    """Return True if a sentence can't be mistaken for a needle."""
    return not LIKE_A_NEEDLE.search(sentence)


def _files(folder: Path) -> Iterator[str]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md"))
    if not files:
        if folder.is_dir():
            reason = "has no .txt or .md file"
        else:
            reason = "is not a folder"
        raise TaskError(f"essay=files:{folder}: {folder} {reason}; essay={SYNTHETIC} needs no corpus", code="no-file")
    for file in files:
        try:
            yield read_regular(file, MAX_FILE_BYTES).decode()
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
                # all tokens except the last token, which is eos
                text = tokenizer.decode(store.read(document, 0, int(store.lengths[document]) - 1).tolist())
                if len(text.split()) >= MIN_DOCUMENT_WORDS:
                    yield text
    except (FolderError, DataError, OSError) as error:
        raise TaskError(
            f"essay=shards:{path}: {error}; essay={SYNTHETIC} needs no corpus", code="unreadable"
        ) from error
