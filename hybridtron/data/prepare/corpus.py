"""The embedded corpus: text that every Python installation holds, so that a first run needs no download.

English from the help topics of the Python documentation, and the sources of the standard library with their
docstrings; about 10 MB. Not a corpus to draw conclusions about language from, but a real one: natural text and code,
documents of all lengths, two sources, a held-out split. It depends on the Python version, which the manifest names;
the digest of the manifest tells two of them apart.

A byte-level BPE is trained on it on the spot. One process or several may prepare the same folder at once: each writes
aside, the first to rename wins, and the others take what is there.
"""

from __future__ import annotations

import itertools
import os
import platform
import secrets
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from hybridtron.data.folder import SMALLEST_VOCABULARY, TokenFolder
from hybridtron.data.prepare.documents import Document, in_validation
from hybridtron.data.prepare.input_files import Input
from hybridtron.data.prepare.parts import Settings
from hybridtron.data.prepare.run import prepare
from hybridtron.data.prepare.vocabulary import vocabulary_of

END_OF_TEXT = "<|endoftext|>"
SETTINGS = Settings(validation=0.05)

# Tests, packages that are not Python's own, tables of numbers, and the topics, which are documents of their own.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
_SKIPPED_FILES = ("pydoc_data/topics.py", "_sysconfigdata")


def documents() -> list[Document]:
    """Every document of the corpus, sorted by where it comes from; sources `text` and `code`."""
    found = itertools.chain(_topics(), _sources(Path(sysconfig.get_path("stdlib"))))
    return sorted(found, key=lambda document: document.where)


def sizes() -> dict[str, int]:
    """Bytes of each source, of training and held out."""
    found: dict[str, int] = {}
    for document in documents():
        assert isinstance(document.content, str)
        found[document.source] = found.get(document.source, 0) + len(document.content.encode())
    return found


def prepare_embedded(path: Path, vocab_size: int) -> TokenFolder:
    """The folder of the embedded corpus, made now unless it is there; its vocabulary may be smaller than asked."""
    if path.exists():
        return TokenFolder.open(path)
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size={vocab_size}; a byte-level vocabulary needs at least {SMALLEST_VOCABULARY}")
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        progress.add_task(f"{path}: training a vocabulary of {vocab_size} on Python's own texts", total=None)
        texts = [document.content for document in documents() if isinstance(document.content, str)]
        tokenizer = train_tokenizer(
            (text for text in texts if not in_validation(text, SETTINGS.validation)), vocab_size
        )
    vocabulary = vocabulary_of(tokenizer.to_str(), "embedded", END_OF_TEXT)
    origin = {"corpus": "embedded", "python": platform.python_version(), "asked_vocab_size": vocab_size}
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        return prepare([Input("embedded", ())], path, vocabulary, SETTINGS, origin=origin, work=aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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


def _topics() -> Iterator[Document]:
    return (Document(text, "text", f"topics/{name}") for name, text in topics.items())


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
                yield Document(text, "code", f"lib/{relative}")
