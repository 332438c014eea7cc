"""Read a user's YAML file beside the configuration: a sweep, or an evaluation.

Such a file is one dictionary with a few known top-level keys. Every fault becomes an `Unusable` with a cure.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from hybridtron.nested import NotParsed, yaml_of
from hybridtron.problems import Unusable, did_you_mean
from hybridtron.regular_files import read_regular

GREATEST = 2**20  # bytes; a larger file is refused


def read_keys(path: Path, known: Collection[str], where: str = "") -> dict[str, Any]:
    """Read the YAML file and return its top-level dictionary, which may have only known keys.

    `where` is the option that names the file, for messages. Raises Unusable if the file can't be read or has another
    key.
    """
    name = f"{where} {path}".strip()
    try:
        content = yaml_of(read_regular(path, GREATEST))
    except NotParsed as error:
        raise Unusable(f"{name} can't be read: it {error}", code="unreadable") from error
    except OSError as error:
        raise Unusable(f"{name} can't be read: {error.strerror or error}", code="unreadable") from error
    if not isinstance(content, dict):
        raise Unusable(f"{name} must hold {', '.join(known)}", code="wrong-type")
    require_known(name, content, known)
    return content


def require_known(name: str, found: Collection[Any], known: Collection[str]) -> None:
    """Raise Unusable for the first key that is not known, and suggest the nearest known one."""
    for key in found:
        if key not in known:
            raise Unusable(
                f"{name} has {key!r}{did_you_mean(str(key), known)}; it can have {', '.join(known)}",
                code="unknown-name",
            )
