"""Prepares the embedded corpus (the Python installation's text) as a folder of tokens, with its own BPE tokenizer.

The corpus depends on the versions of Python and the packages whose files it includes. The manifest records these
versions, so folders from different versions have different digests. Several processes may prepare the same folder at
the same time. Each process writes a temporary folder. The first process that renames its folder to the final name
succeeds, and the others use that folder.
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

from hybridtron.data import pre_tokenizers
from hybridtron.data.folder import MIN_VOCABULARY, TokenFolder
from hybridtron.data.prepare import corpus
from hybridtron.data.prepare.documents import ArgumentError, in_validation
from hybridtron.data.prepare.parts import FolderSettings
from hybridtron.data.prepare.prepare_folder import prepare
from hybridtron.data.prepare.vocabulary import vocabulary_of
from hybridtron.data.prepare.writer import beside
from hybridtron.requirements import installed

END_OF_TEXT = "<|endoftext|>"
SETTINGS = FolderSettings(validation=0.05)


def prepare_embedded(
    path: Path,
    vocab_size: int,
    packages: Sequence[str] = (),
    workers: int = 1,
    pre_tokenizer: str = pre_tokenizers.DEFAULT,
) -> TokenFolder:
    """Open the folder with the embedded corpus, after preparing the folder if it does not exist.

    vocab_size: maximum size for the vocabulary that is trained on the corpus
    packages: installed packages whose Python files are added to the corpus, also for training the vocabulary
    pre_tokenizer: a name from `pre_tokenizers.PATTERNS`
    """
    if path.exists():
        return TokenFolder.open(path)
    if vocab_size < MIN_VOCABULARY:
        raise ArgumentError(
            f"a byte-level vocabulary needs at least {MIN_VOCABULARY} entries, not {vocab_size}", code="out-of-range"
        )
    inputs = [corpus.embedded_input(), *map(corpus.package_input, packages)]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        progress.add_task(f"{path}: training a vocabulary of {vocab_size} on texts of this machine", total=None)
        tokenizer = train_tokenizer(_training_texts(packages), vocab_size, pre_tokenizer)
    vocabulary = vocabulary_of(tokenizer.to_str(), "embedded", END_OF_TEXT)
    origin = {"corpus": "embedded", "python": platform.python_version(), "asked_vocab_size": vocab_size}
    origin |= {package: installed(package) or "Python's" for package in packages}
    with beside(path) as work:
        return prepare(inputs, path, vocabulary, SETTINGS, workers, origin=origin, work=work)


def _training_texts(packages: Sequence[str]) -> Iterator[str]:
    """Yield the texts in the training split, on which the tokenizer is trained."""
    for document in itertools.chain(
        corpus.documents(), *(corpus.packaged(corpus.folder_of(package)) for package in packages)
    ):
        assert isinstance(document.content, str)
        if not in_validation(document.content, SETTINGS.validation):
            yield document.content


def train_tokenizer(texts: Iterable[str], vocab_size: int, pre_tokenizer: str = pre_tokenizers.DEFAULT) -> Tokenizer:
    """Train a byte-level BPE tokenizer, in which END_OF_TEXT has id 0."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.pre_tokenizer(pre_tokenizer)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    # Without this variable, the `tokenizers` package warns at every later fork of this process that a child could
    # deadlock. Forked children of this project never tokenize.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
