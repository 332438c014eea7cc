"""Documents -> tokens and, for documents that mark learned parts, a mask of the learned tokens.

A token is learned if its last character is. So a token that begins before a learned part and ends in it (a space and
the word after it) is learned. A token that begins in it and ends beyond is not, because it would teach the text that
follows. If a character's bytes are several tokens, these are learned together. eos is learned if the token before it
is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from hybridtron.data.prepare.documents import Document, InputError, Learned
from hybridtron.data.prepare.vocabulary import Vocabulary
from hybridtron.data.prepare.writer import token_dtype

PIECE = 2**23  # characters tokenized at once; a longer document is split
NEAR = 2**16  # characters before a segment's limit that are searched for a line break
LARGEST = 2**32 - 2**12  # bytes of a document; an MDS shard stores its offsets in 32 bits
Tokenized = tuple[np.ndarray, np.ndarray | None]


def tokenized(batch: Sequence[Document], vocabulary: Vocabulary) -> Iterator[Tokenized]:
    """Yield each document's tokens without eos, and its mask with an entry for eos; None where all are learned."""
    plain = [document.content for document in batch if document.learned is None]
    short = [text for text in plain if isinstance(text, str) and len(text) <= PIECE]
    tokenizer = vocabulary.tokenizer()
    encoded = iter(tokenizer.encode_batch_fast(short, add_special_tokens=False))
    for content, _, where, learned in batch:
        if isinstance(learned, Learned):
            assert isinstance(content, str)
            yield _until_eos(*masked(content, learned, vocabulary), vocabulary)
        elif not isinstance(content, str):
            yield _until_eos(_checked(content, where, vocabulary), learned, vocabulary)
        elif len(content) <= PIECE:
            yield np.array(next(encoded).ids, np.int64), None
        else:
            pieces = (tokenizer.encode_batch_fast([piece], add_special_tokens=False) for piece in cut(content))
            yield np.concatenate([np.array(encoding.ids, np.int64) for (encoding,) in pieces]), None


def masked(text: str, learned: Learned, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize a text; return its tokens, and whether each is learned."""
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
            last = np.where(ends > begins, ends - 1, begins).clip(max=len(piece) - 1)  # some tokens cover no character
            tokens.append(np.array(encoding.ids, np.int64))
            mask.append(characters[first + last])
            first += len(piece)
    return np.concatenate(tokens), np.concatenate(mask)


def cut(text: str) -> Iterator[str]:
    """Split a text that is too long for one tokenization. Each segment ends with a line.

    A segment ends after a single line break, where common tokenizers separate words, so its tokens are those of the
    full text. Some tokens at the cut differ if there is no line break near it, or if a tokenizer marks the start of a
    text.
    """
    first = 0
    while len(text) - first > PIECE:
        end = place = first + PIECE
        while (place := text.rfind("\n", first + PIECE - NEAR, place)) > 0:
            if not (text[place - 1].isspace() or text[place + 1].isspace()):
                end = place + 1
                break
        yield text[first:end]
        first = end
    yield text[first:]


def _until_eos(tokens: np.ndarray, mask: np.ndarray | None, vocabulary: Vocabulary) -> Tokenized:
    """Drop eos if it already ends the tokens; otherwise add an entry for it to the mask."""
    if len(tokens) and tokens[-1] == vocabulary.eos:
        return tokens[:-1], mask
    return tokens, None if mask is None else np.append(mask, mask[-1:])


def _checked(content: np.ndarray, where: str, vocabulary: Vocabulary) -> np.ndarray:
    """Return another program's tokens as int64; raise InputError if one is outside the vocabulary."""
    tokens = content.astype(np.int64).reshape(-1)
    bad_tokens = tokens[(tokens < 0) | (tokens >= vocabulary.size)]
    if len(bad_tokens):
        raise InputError(
            f"{where}: has token {bad_tokens[0]}, and the tokenizer {vocabulary.name} ends at {vocabulary.size - 1}; "
            "the tokens were made with another one: give that as --tokenizer"
        )
    return tokens


def ended(tokens: np.ndarray, document: Document, vocabulary: Vocabulary) -> np.ndarray:
    """Append eos to a document's tokens; raise InputError if they are too many for a shard."""
    size = (len(tokens) + 1) * np.dtype(token_dtype(vocabulary.size)).itemsize
    if size > LARGEST:
        raise InputError(f"{document.where}: makes {size} bytes of tokens; a document can have {LARGEST}: split it")
    return np.append(tokens, vocabulary.eos)
