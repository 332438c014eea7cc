"""The site has every page in its navigation, and the lists in pages are those of the code.

`make docs` builds it strictly; here only files are compared, without mkdocs.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import yaml

from docs import make_passages, mkdocs_hooks
from tests.docs.conftest import ROOT


class SiteLoader(yaml.SafeLoader):
    """A loader that ignores mkdocs' own tags."""


SiteLoader.add_multi_constructor("", lambda loader, suffix, node: suffix)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), SiteLoader)


def pages(nav: list[object]) -> list[str]:
    """List a navigation's pages, also those in its sections."""
    page_names = []
    for entry in nav:
        (target,) = entry.values()
        page_names += [target] if isinstance(target, str) else pages(target)
    return page_names


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
def test_generated_passages_are_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text()
    assert any(f"<!-- {name} -->" in text for name in make_passages.PASSAGES)
    assert text == make_passages.filled(text), "make reference"


def test_every_package_is_on_the_map() -> None:
    text = (ROOT / "hybridtron/README.md").read_text()
    assert re.findall(r"^<!-- files of (\w+) -->$", text, re.MULTILINE) == make_passages.ROOMS


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


@pytest.mark.parametrize(
    ("place", "link", "expected"),
    [
        ("index.md", "[a](docs/keys.md#optim)", "[a](keys.md#optim)"),
        ("index.md", "![a](benchmarks/laptop_loss.png)", "![a](benchmarks/laptop_loss.png)"),
        ("keys.md", "[a](../README.md)", "[a](index.md)"),
        ("parallel.md", "[a](../benchmarks/gpu.md#steps)", "[a](benchmarks/gpu.md#steps)"),
        ("benchmarks/gpu.md", "[a](../docs/rehearse.md)", "[a](../rehearse.md)"),
        (
            "keys.md",
            "[`a`](../hybridtron/train/trainer.py)",
            "[`a`](https://x.org/blob/HEAD/hybridtron/train/trainer.py)",
        ),
        ("keys.md", "[a](../configs)", "[a](https://x.org/tree/HEAD/configs)"),
        ("keys.md", "[a](https://y.org/b.md) [c](#d)", "[a](https://y.org/b.md) [c](#d)"),
        ("keys.md", "```\n[a](../README.md)\n```\n", "```\n[a](../README.md)\n```\n"),
    ],
)
def test_links_lead_to_the_site_or_to_the_repository(place: str, link: str, expected: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=place))
    assert mkdocs_hooks.on_page_markdown(link, page, SimpleNamespace(repo_url="https://x.org/")) == expected


def test_a_link_to_code_is_its_text_while_the_address_is_unknown() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="keys.md"))
    code = "see [`trainer.py`](../hybridtron/train/trainer.py)."
    assert mkdocs_hooks.on_page_markdown(code, page, SimpleNamespace(repo_url="")) == "see `trainer.py`."
