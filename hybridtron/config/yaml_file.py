"""Read a user's YAML file that is not a configuration, such as a sweep or an evaluation suite.

Such a file contains a dictionary with known top-level keys. For any other content the functions raise `Unusable`, with
a message for the user.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from hybridtron.nested import NotParsed, yaml_of
from hybridtron.problems import Unusable, did_you_mean
from hybridtron.safe_open import read_regular

MAX_YAML_BYTES = 2**20  # maximum size of a file


def read_keys(path: Path, known: Collection[str], where: str = "") -> dict[str, Any]:
    """Read a YAML file and return its content, a dictionary.

    known: allowed top-level keys; the values are not checked
    where: command-line option that names the file, for messages

    Raises Unusable if the file can't be read, contains no dictionary, or has a top-level key that is not in `known`.
    """
    name = f"{where} {path}".strip()
    try:
        content = yaml_of(read_regular(path, MAX_YAML_BYTES))
    except NotParsed as error:
        raise Unusable(f"{name} can't be read: it {error}", code="unreadable") from error
    except OSError as error:
        raise Unusable(f"{name} can't be read: {error.strerror or error}", code="unreadable") from error
    if not isinstance(content, dict):
        raise Unusable(f"{name} must contain a dictionary with the keys {', '.join(known)}", code="wrong-type")
    require_known(name, content, known)
    return content


def require_known(name: str, found: Collection[Any], known: Collection[str]) -> None:
    """Raise Unusable for the first key in `found` that is not in `known`. The message suggests a similar known key.

    `name` is the subject of the message, such as the file's name.
    """
    for key in found:
        if key not in known:
            raise Unusable(
                f"{name} has {key!r}{did_you_mean(str(key), known)}; use {', '.join(known)}",
                code="unknown-name",
            )
