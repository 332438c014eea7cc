"""Pickles that attack the process in which they are read."""

from __future__ import annotations


class Victim:
    """A class for such a pickle."""


def state_of_a_class(name: str, attribute: str, value: str) -> bytes:
    """Return a pickle that sets an attribute of a class `module.name`. A usual unpickler sets it for the process."""
    module, _, rest = name.rpartition(".")
    texts = [b"X" + len(text).to_bytes(4, "little") + text.encode() for text in (attribute, value)]
    return b"c%b\n%b\nN}%b%bs\x86b." % (module.encode(), rest.encode(), *texts)
