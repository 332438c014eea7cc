"""The docs hold: links lead somewhere, files exist, YAML and Python are valid, and the README is short."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from hybridtron.config.load import CONFIGS, load
from hybridtron.sweep.grid import read as read_sweep
from tests.docs.conftest import PAGES, ROOT, blocks, command_lines, name_of

NOT_RUN = "# not run here: "
FILE = "# hybridtron/"  # the tutorial's files, which tests/test_tutorial.py runs


def anchors(page: Path) -> set[str]:
    """Return the anchors that `page.md#...` can name: the page's headings in GitHub's spelling."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_pages_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_readme_is_short_and_links_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 120
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in text] == []


def test_other_programs_in_pages_are_known() -> None:
    """Make targets, extras, modules and files that commands name."""
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for words in command_lines(page):
            program, *arguments = words
            if program == "make":
                targets = [word for word in arguments if "=" not in word]
                assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
            elif program == "pip":
                named = re.findall(r"\[([\w,]+)\]", " ".join(arguments))
                assert {extra for names in named for extra in names.split(",")} <= extras.keys()
            elif program == "python":
                assert arguments[0] == "-m"
                assert importlib.util.find_spec(arguments[1])
            elif program == "hf":
                assert arguments[0] == "download"
            elif program == "cp":
                assert arguments[0].startswith("/data/") or (ROOT / arguments[0]).is_file()
            elif program == "git":
                assert {"clone", "checkout"} & set(arguments)
            else:
                assert program in ("hybridtron", "torchrun"), f"{name_of(page)}: {program}"


SWEEP = ("# examples/sweep/", "settings:")  # how the file of a sweep begins


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=name_of)
def test_yaml_in_pages_is_a_configuration(page: Path, tmp_path: Path) -> None:
    recipes = tmp_path / "recipe"
    for folder in CONFIGS.iterdir():
        if folder.name != "recipe":
            (tmp_path / folder.name).symlink_to(folder)
    recipes.mkdir()
    for recipe in CONFIGS.glob("recipe/*"):
        (recipes / recipe.name).symlink_to(recipe)
    for number, block in enumerate(blocks(page, "yaml")):
        if block.lstrip().startswith(SWEEP):
            (tmp_path / "sweep.yaml").write_text(block)
            assert read_sweep(tmp_path / "sweep.yaml").runs
            continue
        package = "" if "@package" in block else "# @package _global_\n"
        (recipes / f"page_{number}.yaml").write_text(package + block)
        phases = ["phases=[{tokens: 1M, seq_len: 8, global_batch: 1}]"]
        if "phases:" in block or "/recipe/" in block:
            phases = []
        load([f"recipe=page_{number}", "model=laptop", "run.name=x", "data.path=x", *phases], tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_in_pages_runs(
    page: Path, counting_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = f'"model.vocab_size=32", "data=folder", "data.path={counting_folder}", "data.epochs=null"'
    for block in blocks(page, "python"):
        code = compile(block.replace('"model.vocab_size=300"', prepared), name_of(page), "exec")
        if not block.startswith((NOT_RUN, FILE)):
            for _ in range(2):  # nothing that it does keeps it from working again
                exec(code, {"__name__": "page"})
