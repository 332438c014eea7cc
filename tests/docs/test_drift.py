"""Pages agree with the code and with each other."""

from __future__ import annotations

import re

from hybridtron.architecture import SPECS
from tests.docs.conftest import ROOT
from tests.test_architecture import ORDER


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def cells(page: str, row: str) -> list[str]:
    """Split the line that begins with this cell into cells; the last such line of a page counts."""
    line = [line for line in text_of(page).splitlines() if line.startswith(f"| {row} |")][-1]
    return [cell.strip() for cell in line.strip("|").split("|")]


def percent(cell: str) -> str:
    return f"{round(100 * float(cell.split(' ')[0]), 1):g}%"


def test_every_kind_has_a_row_in_the_table_of_mixers() -> None:
    table = text_of("docs/mixers.md").partition("\n| `kind` | what it is")[2].partition("\n\n")[0]
    assert [kind for kind in SPECS if f"`{kind}`" not in table] == []


def test_the_readme_has_the_measured_steps_of_the_gpu_page() -> None:
    """The first row of a recipe in benchmarks/gpu.md is the one that the README shows."""
    table = text_of("README.md").partition("| recipe | rows x tokens |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    steps = text_of("benchmarks/gpu.md").partition("\n## Steps\n")[2].partition("\n## ")[0]
    for recipe, size, rate, mfu, memory, _ in rows:
        line = next(line for line in steps.splitlines() if line.startswith(f"| {recipe} |"))
        measured = [cell.strip() for cell in line.strip("|").split("|")]
        assert [size, rate, mfu, memory] == [measured[1], *measured[3:5], f"{measured[7]} GB"]
    assert len(rows) == 4


def test_the_picture_has_rooms_of_the_package_in_the_order_of_imports() -> None:
    """Floors stand above the rooms that they import from."""
    rooms = re.findall(r'class="room" x="\d+" y="(\d+)"[^>]*>(\w+)<', text_of("docs/images/hybridtron.svg"))
    floors = sorted({int(height) for height, _ in rooms}, reverse=True)
    order = [room for floor in floors for height, room in rooms if int(height) == floor]
    assert len(order) > 15
    assert [room for room in order if not (ROOT / "hybridtron" / room).is_dir()] == []
    assert order == sorted(order, key=ORDER.index)


def test_pages_repeat_measured_numbers() -> None:
    """docs/states.md has the measured numbers for copying and keys; the joint recall README has the verdicts."""
    states = text_of("docs/states.md")
    for row in ("zero", "passing"):
        assert f"copies {percent(cells('studies/length_story/length_story.md', row)[-1])}" in states
    for row, sentence in (("from zero states", "finds {} of them"), ("from fitted noise", "and {} when")):
        assert sentence.format(percent(cells("studies/passkey/passkey.md", row)[-1])) in states
    verdicts = re.findall(
        r"^\| Figure 5 \(joint recall\) \| .* \| (.*) \|$", text_of("studies/papers/pages/overview.md"), re.MULTILINE
    )
    pairs = (
        text_of("studies/joint_recall/joint_recall.md")
        .partition("## What the paper says of pairs")[2]
        .partition("\n## ")[0]
    )
    assert sorted(re.findall(r"^\| \w.* \| ([a-z ]+) \|$", pairs, re.MULTILINE)[1:]) == sorted(verdicts)
    counted = [verdicts.count(said) for said in ("agrees", "does not agree", "undecided", "one seed")]
    assert counted == [0, 1, 4, 5]
    readme = " ".join(text_of("studies/joint_recall/README.md").split())
    assert "of ten claims none agrees, one does not (a window above key selection), four are undecided" in readme
