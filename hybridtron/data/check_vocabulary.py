"""Checks that a phase's data and its initial weights have equal vocabularies.

The weights have learned what each token id means. In another vocabulary the same id stands for another text.
`run.accept_data_changes` turns the check off.
"""

from __future__ import annotations

from pathlib import Path

from hybridtron.config.schema import Config
from hybridtron.config.weights import tokenizer_of
from hybridtron.data.folder import TokenFolder
from hybridtron.problems import Problem


def meaning_problems(config: Config, index: int, data: TokenFolder | str) -> list[Problem]:
    """Return a problem if the phase's data has another vocabulary than the phase's initial weights.

    data: the opened folder of prepared tokens; or, with `data.source=embedded`, the path of a folder that does not
        exist yet and would get a newly trained tokenizer

    The list is empty if the phase has no initial weights, if their tokenizer can't be read, or if
    `run.accept_data_changes` is set.
    """
    entry = _weights_of(config, index)
    if entry is None or (tokenizer := _tokenizer_file(entry[1])) is None or config.run.accept_data_changes:
        return []
    from hybridtron.data.same_vocabulary import difference  # it imports tokenizers

    key, weights = entry
    if isinstance(data, str):
        why = f"which was trained with the vocabulary of {tokenizer}, but {data} would get a new vocabulary"
    elif differs := difference(tokenizer.read_bytes(), data.tokenizer_file.read_bytes()):
        why = f"which was trained with the vocabulary of {tokenizer}, but {data.name} has another vocabulary: {differs}"
    else:
        return []
    cure = f"prepare text with hybridtron data prepare --tokenizer {tokenizer} and set data.source=folder"
    return [Problem(key, "mismatch", f"is {weights}, {why}; {cure}, or set run.accept_data_changes=true")]


def vocabulary_warnings(config: Config) -> list[str]:
    """Return a warning for each folder of initial weights that has no readable tokenizer."""
    weights_by_key = dict(
        entry for index in range(len(config.phases)) if (entry := _weights_of(config, index)) is not None
    )
    message = "has no readable tokenizer, so it can't be checked that the data has the vocabulary of these weights"
    return [f"{key}={folder} {message}" for key, folder in weights_by_key.items() if _tokenizer_file(folder) is None]


def _weights_of(config: Config, index: int) -> tuple[str, str] | None:
    """Return the key that names a phase's initial weights, and the key's value; None if training starts from scratch.

    A phase without `init_from` continues with the weights of the phase before it.
    """
    for number in range(index, 0, -1):
        if (folder := config.phases[number].init_from) is not None:
            return f"phases.{number}.init_from", folder
    if config.run.weights is None:
        return None
    return ("run.weights", config.run.weights)


def _tokenizer_file(folder: str) -> Path | None:
    """Return the tokenizer file in a folder with weights; None if the folder has none, or the file can't be read."""
    from hybridtron.data.same_vocabulary import is_readable  # it imports tokenizers

    tokenizer = tokenizer_of(folder)
    if tokenizer is not None and is_readable(tokenizer.read_bytes()):
        return tokenizer
    return None
