"""Tokenizes documents, and computes for each token whether it counts in the loss.

Characters and tokens are learned if they count in the loss. Some documents mark their learned characters. A token is
learned if its last character is learned:

- A token that begins before a learned span and ends inside the span is learned.
- A token that begins inside a learned span and ends after the span is not learned, because the model would also learn
  the text after the span.
- If several tokens encode the bytes of one character, all of them are learned, or none.
- eos is learned if the last token before eos is learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from hybridtron.data.prepare.documents import Document, InputError, Learned
from hybridtron.data.prepare.vocabulary import Vocabulary
from hybridtron.data.prepare.writer import token_dtype

PIECE = 2**23  # maximum characters of a text that is tokenized at once; a longer document is split into segments
NEAR = 2**16  # number of characters before a segment's limit in which a line break is searched
MAX_DOCUMENT_BYTES = 2**32 - 2**12  # maximum bytes of a document's tokens; an MDS shard has 32-bit byte offsets
Tokenized = tuple[np.ndarray, np.ndarray | None]


def tokenized(batch: Sequence[Document], vocabulary: Vocabulary) -> Iterator[Tokenized]:
    """Yield (tokens without eos, mask) for each document.

    The mask has an entry for each token and for eos. The mask is None if all tokens are learned.
    """
    plain = [document.content for document in batch if document.learned is None]
    short = [text for text in plain if isinstance(text, str) and len(text) <= PIECE]
    tokenizer = vocabulary.tokenizer()
    encoded = iter(tokenizer.encode_batch_fast(short, add_special_tokens=False))
    for content, _, where, learned in batch:
        if isinstance(learned, Learned):
            assert isinstance(content, str)
            yield _until_eos(*tokenize_with_mask(content, learned, vocabulary), vocabulary)
        elif not isinstance(content, str):
            yield _until_eos(_check_ids(content, where, vocabulary), learned, vocabulary)
        elif len(content) <= PIECE:
            yield np.array(next(encoded).ids, np.int64), None
        else:
            pieces = (tokenizer.encode_batch_fast([piece], add_special_tokens=False) for piece in cut(content))
            yield np.concatenate([np.array(encoding.ids, np.int64) for (encoding,) in pieces]), None


def tokenize_with_mask(text: str, learned: Learned, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize a text; return its tokens, and for each token a boolean that says whether the token is learned."""
    tokenizer = vocabulary.with_offsets(learned.special)
    characters = np.zeros(len(text), np.bool_)
    for first, end in learned.spans:
        characters[first:end] = True
    boundaries = sorted({0, len(text), *(chain(*learned.spans) if learned.apart else ())})
    tokens = [np.empty(0, np.int64)]
    mask = [np.empty(0, np.bool_)]
    for first, end in pairwise(boundaries):
        for piece in cut(text[first:end]):
            encoding = tokenizer.encode(piece, add_special_tokens=False)
            begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            # index of each token's last character; some tokens cover no character
            last = np.where(ends > begins, ends - 1, begins).clip(max=len(piece) - 1)
            tokens.append(np.array(encoding.ids, np.int64))
            mask.append(characters[first + last])
            first += len(piece)
    return np.concatenate(tokens), np.concatenate(mask)


def cut(text: str) -> Iterator[str]:
    """Yield segments of at most PIECE characters, which are tokenized separately.

    A segment ends after a single line break if there is one among its last NEAR characters. Common tokenizers never
    merge text across a single line break, so the segments' tokens are equal to the tokens of the full text. Without
    such a line break, or if the tokenizer marks the start of a text, some tokens at a segment's ends differ.
    """
    first = 0
    while len(text) - first > PIECE:
        end = position = first + PIECE
        while (position := text.rfind("\n", first + PIECE - NEAR, position)) > 0:
            if not (text[position - 1].isspace() or text[position + 1].isspace()):
                end = position + 1
                break
        yield text[first:end]
        first = end
    yield text[first:]


def _until_eos(tokens: np.ndarray, mask: np.ndarray | None, vocabulary: Vocabulary) -> Tokenized:
    """Return tokens without eos, and the mask with an entry for eos.

    tokens, mask: both with eos, or both without eos
    """
    if len(tokens) and tokens[-1] == vocabulary.eos:
        return tokens[:-1], mask
    return tokens, None if mask is None else np.append(mask, mask[-1:])


def _check_ids(content: np.ndarray, where: str, vocabulary: Vocabulary) -> np.ndarray:
    """Return another program's tokens as int64; raise InputError if a token is outside the vocabulary."""
    tokens = content.astype(np.int64).reshape(-1)
    bad_tokens = tokens[(tokens < 0) | (tokens >= vocabulary.size)]
    if len(bad_tokens):
        raise InputError(
            f"{where}: has token {bad_tokens[0]}, but the tokenizer {vocabulary.name} has tokens up to "
            f"{vocabulary.size - 1}; set --tokenizer to the tokenizer that made these tokens",
            code="mismatch",
        )
    return tokens


def append_eos(tokens: np.ndarray, document: Document, vocabulary: Vocabulary) -> np.ndarray:
    """Append eos to a document's tokens; raise InputError if the tokens are too large for a shard."""
    size = (len(tokens) + 1) * np.dtype(token_dtype(vocabulary.size)).itemsize
    if size > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"{document.where}: has {size} bytes of tokens, but at most {MAX_DOCUMENT_BYTES} fit; split the document",
            code="does-not-fit",
        )
    return np.append(tokens, vocabulary.eos)
