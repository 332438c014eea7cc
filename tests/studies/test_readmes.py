"""READMEs of studies: the index names every study, and each begins with question, command, result and hours."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from studies.results import ROOT

STUDIES = ROOT / "studies"
FOLDERS = sorted(path.parent.name for path in STUDIES.glob("*/README.md"))


def test_the_index_names_every_study() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(\1/README\.md\) \|", (STUDIES / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == FOLDERS == sorted(path.name for path in STUDIES.iterdir() if any(path.glob("**/*.yaml")))


@pytest.mark.parametrize("study", FOLDERS)
def test_a_readme_begins_with_question_command_result_and_hours(study: str) -> None:
    lines = (STUDIES / study / "README.md").read_text().splitlines()
    begins = [line for line in lines[2:10] if line.startswith("- ")]
    assert [line.split(": ")[0] for line in begins] == ["- Question", "- Command", "- Result", "- Hours"]


def test_readmes_count_the_verdicts_of_the_overview() -> None:
    overview = (STUDIES / "papers/pages/overview.md").read_text()
    verdicts = Counter(re.findall(r"^\| [^|]+ \| [^|]+ \| ([a-z ]+) \|$", overview, re.MULTILINE))
    del verdicts["ours"]  # the tables' headers
    claims = verdicts.total()
    agree = verdicts["agrees"]
    disagree = verdicts["does not agree"]
    few = verdicts["one seed"] + verdicts["too few seeds"]
    counted = (
        f"{agree} agree, {disagree} do not, {verdicts['undecided']} are undecided, {few} have too few seeds, "
        f"{verdicts['does not fail at this size']} are about models that fail and ours do not, "
        f"{verdicts['another measure']} has another measure"
    )
    unseen = f"{verdicts['cannot be seen at this size']} cannot be seen"
    for page in (STUDIES / "README.md", STUDIES / "papers/README.md"):
        text = " ".join(page.read_text().split())
        assert counted in text
        assert unseen in text
        assert f"{claims} claims" in text
