"""Pickles that attack the process in which they are read."""

from __future__ import annotations

import os
from pathlib import Path


class Victim:
    """A class whose attributes a pickle tries to set."""


def state_of_a_class(name: str, attribute: str, value: str) -> bytes:
    """Return a pickle that sets an attribute of a class `module.name`. A usual unpickler sets it for the process."""
    module, _, rest = name.rpartition(".")
    texts = [b"X" + len(text).to_bytes(4, "little") + text.encode() for text in (attribute, value)]
    return b"c%b\n%b\nN}%b%bs\x86b." % (module.encode(), rest.encode(), *texts)


class Call:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)
