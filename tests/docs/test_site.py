"""The site has every page in its navigation, and the lists in pages are those of the code.

`make docs` builds it strictly; here only files are compared, without mkdocs.
"""

from __future__ import annotations

import re

import pytest
import yaml

from docs import make_passages
from tests.docs.conftest import ROOT


class SiteLoader(yaml.SafeLoader):
    """A loader that ignores mkdocs' own tags."""


SiteLoader.add_multi_constructor("", lambda loader, suffix, node: suffix)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), SiteLoader)


def pages(nav: list[object]) -> list[str]:
    """List the pages of a navigation, of its sections too."""
    found = []
    for entry in nav:
        (target,) = entry.values()
        found += [target] if isinstance(target, str) else pages(target)
    return found


def test_the_navigation_has_every_page_of_the_docs() -> None:
    shown = pages(SITE["nav"])
    assert len(shown) == len(set(shown))
    inside = {page.name for page in (ROOT / "docs").glob("*.md")}
    outside = set(shown) - inside - {"index.md"}
    assert inside <= set(shown)
    assert [page for page in outside if not (ROOT / page).is_file()] == []


def test_the_sections_are_in_the_order_of_a_user() -> None:
    names = [name for entry in SITE["nav"] for name in entry]
    assert names[:6] == ["Home", "Install", "First run", "Your data", "Your model", "Scale out"]
    assert names[6:] == ["Resume", "Evaluate", "Export", "Debug", "Extend", "Reference", "Background"]


@pytest.mark.parametrize("page", make_passages.PAGES)
def test_passages_are_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text()
    assert any(f"<!-- {name} -->" in text for name in make_passages.PASSAGES)
    assert text == make_passages.filled(text), "make reference"


def test_a_passage_is_filled_between_its_marks() -> None:
    filled = make_passages.filled("of <!-- schedules -->old<!-- /schedules -->, in general")
    assert re.fullmatch(r"of <!-- schedules -->`\w+`(, `\w+`)+<!-- /schedules -->, in general", filled)


def test_the_api_page_names_objects_that_exist() -> None:
    names = re.findall(r"^::: hybridtron\.(\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert len(names) > 10
    for name in names:
        module, _, member = name.rpartition(".")
        source = ROOT / "hybridtron" / f"{module.replace('.', '/')}.py"
        assert re.search(rf"^(class|def) {member}\b", source.read_text(), re.MULTILINE), name
