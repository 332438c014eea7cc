"""The changelog keeps its form: short lines under known headings, and the package's version as its newest release."""

from __future__ import annotations

import re

import pytest

import hybridtron
from tests.docs.conftest import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text()
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
FIRST = "0.2.0"  # describes the whole package, by area


def releases() -> dict[str, str]:
    """Return the text of each release by its heading, newest first."""
    parts = re.split(r"^## (.+)$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_changelog_begins_with_unreleased_changes() -> None:
    headings = list(releases())
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(hybridtron.__version__)} - \d{{4}}-\d\d-\d\d", headings[1])


@pytest.mark.parametrize("page", ["README.md", "docs/status.md"])
def test_pages_name_the_current_version(page: str) -> None:
    assert re.findall(r"^Version (\d+\.\d+\.\d+)\.", (ROOT / page).read_text(), re.MULTILINE) == [
        hybridtron.__version__
    ]


def test_lines_of_the_changelog_are_short() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > 120] == []


def test_changes_are_bullets_of_one_line_under_known_headings() -> None:
    for heading, text in releases().items():
        if heading.startswith(FIRST):
            continue
        lines = [line for line in text.splitlines() if line]
        unknown = [line for line in lines if not line.startswith(("- ", *(f"### {kind}" for kind in KINDS)))]
        assert unknown == [], f"{heading}: one line per change, under one of {', '.join(KINDS)}"
        assert not lines or lines[0].startswith("### "), f"{heading}: a change without a heading"


def test_the_first_release_fits_on_one_page() -> None:
    (text,) = [text for heading, text in releases().items() if heading.startswith(FIRST)]
    assert text.count("\n") <= 60
