"""What a planted bug is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Replaced = dict[str, Any]  # where an attribute stands -> what stands there instead


@dataclass(frozen=True)
class Bug:
    """What goes wrong, what is replaced for it, and where it shows: an architecture and a layout of the table."""

    effect: str
    replaced: Replaced
    architecture: str
    layout: str
