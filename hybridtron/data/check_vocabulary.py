"""Checks that initial weights are trained on tokens of their own vocabulary, unless the run accepts other data."""

from __future__ import annotations

from pathlib import Path

from hybridtron.config.schema import Config
from hybridtron.config.weights import tokenizer_of
from hybridtron.data.folder import TokenFolder
from hybridtron.problems import Problem


def meaning_problems(config: Config, index: int, data: TokenFolder | str) -> list[Problem]:
    """Report a problem if token ids in a phase's data mean something else to its initial weights.

    data: the opened folder, or the path of an embedded corpus that would be prepared now, with its own vocabulary

    Nothing is reported without initial weights, if their tokenizer can't be read, or with run.accept_data_changes.
    """
    entry = _named(config, index)
    if entry is None or (tokenizer := _readable(entry[1])) is None or config.run.accept_data_changes:
        return []
    from hybridtron.data.same_vocabulary import difference  # it imports tokenizers

    key, weights = entry
    if isinstance(data, str):
        why = f"which has a vocabulary, and {data} would be made now, with a tokenizer of its own"
    elif differs := difference(tokenizer.read_bytes(), data.tokenizer_file.read_bytes()):
        why = f"but {data.name} has tokens of another vocabulary: {differs}"
    else:
        return []
    cure = f"use tokens made with its own (hybridtron data prepare --tokenizer {tokenizer}; data.source=folder)"
    return [Problem(key, "mismatch", f"is {weights}, {why}; {cure}, or run.accept_data_changes=true")]


def vocabulary_warnings(config: Config) -> list[str]:
    """Warn about initial weights without a readable tokenizer: the data can't be compared with it."""
    weights_by_key = dict(entry for index in range(len(config.phases)) if (entry := _named(config, index)) is not None)
    message = "has no tokenizer that can be read: that the data is of its vocabulary is taken on trust"
    return [f"{key}={folder} {message}" for key, folder in weights_by_key.items() if _readable(folder) is None]


def _named(config: Config, index: int) -> tuple[str, str] | None:
    """Return the key that names a phase's initial weights, and its value; None if training starts from scratch.

    A phase continues the phase before it unless it has weights of its own.
    """
    for number in range(index, 0, -1):
        if (folder := config.phases[number].init_from) is not None:
            return f"phases.{number}.init_from", folder
    if config.run.weights is None:
        return None
    return ("run.weights", config.run.weights)


def _readable(folder: str) -> Path | None:
    """Return the tokenizer file that belongs to weights; None if there is none, or it can't be read."""
    from hybridtron.data.same_vocabulary import is_readable  # it imports tokenizers

    tokenizer = tokenizer_of(folder)
    if tokenizer is not None and is_readable(tokenizer.read_bytes()):
        return tokenizer
    return None
