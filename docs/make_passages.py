"""Write passages of pages that list what the code registers: the order of imports, kinds of mixers, schedules.

A passage is the text between `<!-- NAME -->` and `<!-- /NAME -->` on a page of `PAGES`. `make reference` runs this; a
test compares the result with the pages in the repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from hybridtron.architecture import SPECS
from hybridtron.config.lr_shapes import SHAPES
from tests.test_architecture import ORDER

ROOT = Path(__file__).parents[1]
PAGES = ("hybridtron/README.md", "configs/README.md", "docs/glossary.md")


def import_order() -> str:
    """Write the rooms of the package from left to right, those below the device on one floor."""
    floor = ORDER.index("device")
    rooms = [", ".join(ORDER[:floor]), *(room for room in ORDER[floor:] if room != "__main__")]
    return f"\n`{' -> '.join(rooms)}`\n"


def listed(names: Iterable[str]) -> str:
    """Write names as a list in running text."""
    return ", ".join(f"`{name}`" for name in names)


PASSAGES: dict[str, Callable[[], str]] = {
    "order": import_order,
    "kinds": lambda: listed(SPECS),
    "schedules": lambda: listed(SHAPES),
}


def filled(text: str) -> str:
    """Return a page's text with every passage as the code has it."""
    marked = re.compile(rf"<!-- ({'|'.join(PASSAGES)}) -->.*?<!-- /\1 -->", re.DOTALL)
    return marked.sub(lambda match: f"<!-- {match[1]} -->{PASSAGES[match[1]]()}<!-- /{match[1]} -->", text)


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text()))
        sys.stdout.write(f"{path}\n")
