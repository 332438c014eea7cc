"""Tokenizers for tasks: a local tokenizer.json, or bytes as tokens. No special tokens (such as bos) are added.

A task's samples depend on the tokenizer, because their length is counted in tokens. So every sample set that is written
records the tokenizer's digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from hybridtron.data.folder import MAX_TOKENIZER_BYTES
from hybridtron.data.tokenizer_file import BadTokenizer, read_tokenizer
from hybridtron.limits import possible_path
from hybridtron.safe_open import Unreadable, read_regular
from hybridtron.tasks.base import TaskError, TextTokens

BYTES = "bytes"


@dataclass(frozen=True)
class ByteTokens:
    """The byte tokenizer: every byte of a text's UTF-8 is a token."""

    digest: str = BYTES

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


@dataclass(frozen=True)
class FileTokens:
    """A tokenizer from tokenizer.json. Special tokens' names in a text are encoded as plain text."""

    tokenizer: Tokenizer = field(compare=False)
    digest: str

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)


def open_tokens(name: str) -> TextTokens:
    """Open a tokenizer; `name` is `bytes`, the path of a tokenizer.json, or a folder that contains a tokenizer.json.

    Raises TaskError if the file can't be read.
    """
    if name == BYTES:
        return ByteTokens()
    if (fault := possible_path(name)) is not None:
        raise TaskError(f"--tokenizer {fault.message}", code=fault.code)
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = read_regular(file, MAX_TOKENIZER_BYTES)
        tokenizer = read_tokenizer(content, spelled=True)
    except FileNotFoundError as error:
        cure = f"name a tokenizer.json, a folder that contains a tokenizer.json, or {BYTES}"
        raise TaskError(f"--tokenizer {name}: {file} does not exist; {cure}", code="no-file") from error
    except (Unreadable, OSError) as error:
        raise TaskError(f"--tokenizer {name}: {file} can't be read: {error}", code="unreadable") from error
    except BadTokenizer as error:
        raise TaskError(f"--tokenizer {name}: {file} is not a tokenizer.json: {error}", code="unreadable") from error
    return FileTokens(tokenizer, hashlib.sha256(content).hexdigest())
