"""The embedded corpus: text that every Python installation holds, so that a first run needs no download.

English from the help topics of the Python documentation, and the sources of the standard library with their
docstrings; about 10 MB. Not a corpus to draw conclusions about language from, but a real one: natural text and code,
documents of all lengths, a held-out split. It depends on the Python version, which the manifest names; the digest of
the manifest tells two of them apart.

A byte-level BPE is trained on it on the spot. One process or several may prepare the same folder at once: each writes
aside, the first to rename wins, and the others take what is there.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress, TaskID
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from hybridtron.data.folder import SMALLEST_VOCABULARY, TokenFolder, write_folder

END_OF_TEXT = "<|endoftext|>"
VALIDATION_EVERY = 20  # one document in so many, by the hash of its name
BATCH = 32  # documents tokenized at once

# Tests, packages that are not Python's own, tables of numbers, and the topics, which are documents of their own.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
_SKIPPED_FILES = ("pydoc_data/topics.py", "_sysconfigdata")


class Document(NamedTuple):
    """A text and a name that no other document has."""

    name: str
    text: str


def documents() -> list[Document]:
    """Every document of the corpus, sorted by name."""
    return sorted(itertools.chain(_topics(), _sources(Path(sysconfig.get_path("stdlib")))))


def held_out_document(name: str) -> bool:
    """Whether a document belongs to validation."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VALIDATION_EVERY == 0


def prepare_embedded(path: Path, vocab_size: int) -> TokenFolder:
    """The folder of the embedded corpus, made now unless it is there; its vocabulary may be smaller than asked."""
    if path.exists():
        return TokenFolder.open(path)
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size={vocab_size}; a byte-level vocabulary needs at least {SMALLEST_VOCABULARY}")
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{path}: reading Python's own texts", total=None)
        texts = documents()
        split = {
            "train": [d.text for d in texts if not held_out_document(d.name)],
            "validation": [d.text for d in texts if held_out_document(d.name)],
        }
        progress.update(task, description=f"{path}: training a vocabulary of {vocab_size}")
        tokenizer = train_tokenizer(split["train"], vocab_size)
        eos = tokenizer.token_to_id(END_OF_TEXT)
        assert eos is not None
        progress.update(task, description=f"{path}: tokenizing", total=len(texts))
        return write_folder(
            path,
            {name: _tokenized(tokenizer, of_split, progress, task) for name, of_split in split.items()},
            tokenizer.to_str(),
            tokenizer.get_vocab_size(),
            eos,
            {"corpus": "embedded", "python": platform.python_version(), "asked_vocab_size": vocab_size},
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with END_OF_TEXT as entry 0; any text survives encoding and decoding."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    # Without a word of ours, tokenizers warns at every later fork of the process. Forked children never tokenize.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(folder: TokenFolder) -> Tokenizer:
    """The tokenizer that a folder's tokens were made with, to encode a prompt and to decode what a model wrote."""
    return Tokenizer.from_file(str(folder.tokenizer_file))


def _tokenized(tokenizer: Tokenizer, texts: list[str], progress: Progress, task: TaskID) -> Iterator[list[int]]:
    tokenizer.encode_special_tokens = True  # a text that spells END_OF_TEXT does not end there
    for first in range(0, len(texts), BATCH):
        encodings = tokenizer.encode_batch_fast(texts[first : first + BATCH])
        yield from (encoding.ids for encoding in encodings)
        progress.advance(task, len(encodings))


def _topics() -> Iterator[Document]:
    return (Document(f"topics/{name}", text) for name, text in topics.items())


def _sources(root: Path) -> Iterator[Document]:
    """The Python sources below a folder, without the empty ones and those that are not UTF-8."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in files:
            file = Path(folder, name)
            relative = file.relative_to(root).as_posix()
            if file.suffix != ".py" or relative.startswith(_SKIPPED_FILES):
                continue
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if text:
                yield Document(f"lib/{relative}", text)
