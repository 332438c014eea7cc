"""The embedded corpus (`corpus.py`) as a prepared folder, with a byte-level BPE tokenizer that is trained on it.

The corpus depends on Python's version, and on those of the packages whose sources it includes. The manifest names them;
its digest distinguishes versions. Several processes may prepare the same folder at once: each writes a temporary
folder, the first to rename it wins, and the others use the winner's.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from hybridtron.data.folder import SMALLEST_VOCABULARY, TokenFolder
from hybridtron.data.prepare import corpus
from hybridtron.data.prepare.documents import ArgumentError, in_validation
from hybridtron.data.prepare.parts import FolderSettings
from hybridtron.data.prepare.run import prepare
from hybridtron.data.prepare.vocabulary import vocabulary_of
from hybridtron.data.prepare.writer import beside
from hybridtron.requirements import installed

END_OF_TEXT = "<|endoftext|>"
SETTINGS = FolderSettings(validation=0.05)


def prepare_embedded(path: Path, vocab_size: int, packages: Sequence[str] = (), workers: int = 1) -> TokenFolder:
    """Return the embedded corpus's folder, prepared now unless it exists. Its vocabulary may be smaller than asked.

    packages: installed packages whose sources are added; they count for the vocabulary
    """
    if path.exists():
        return TokenFolder.open(path)
    if vocab_size < SMALLEST_VOCABULARY:
        raise ArgumentError(f"{vocab_size} entries: a byte-level vocabulary needs at least {SMALLEST_VOCABULARY}")
    inputs = [corpus.embedded_input(), *map(corpus.package_input, packages)]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        progress.add_task(f"{path}: training a vocabulary of {vocab_size} on texts of this machine", total=None)
        tokenizer = train_tokenizer(_learned_texts(packages), vocab_size)
    vocabulary = vocabulary_of(tokenizer.to_str(), "embedded", END_OF_TEXT)
    origin = {"corpus": "embedded", "python": platform.python_version(), "asked_vocab_size": vocab_size}
    origin |= {package: installed(package) or "Python's" for package in packages}
    with beside(path) as work:
        return prepare(inputs, path, vocabulary, SETTINGS, workers, origin=origin, work=work)


def _learned_texts(packages: Sequence[str]) -> Iterator[str]:
    """Yield the texts that are not held out, for training the tokenizer."""
    for document in itertools.chain(
        corpus.documents(), *(corpus.packaged(corpus.folder_of(package)) for package in packages)
    ):
        assert isinstance(document.content, str)
        if not in_validation(document.content, SETTINGS.validation):
            yield document.content


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with END_OF_TEXT as entry 0. Any text survives encoding and decoding."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    # If this is not set, tokenizers warns at every later fork of the process. Forked children never tokenize.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
