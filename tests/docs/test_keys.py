"""docs/keys.md agrees with the schema, key by key."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from types import ModuleType

import pytest

from hybridtron.architecture import SPECS
from hybridtron.config.lr_shapes import SHAPES
from tests.docs.conftest import ROOT


@pytest.fixture(scope="module")
def make_keys() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_keys", ROOT / "docs" / "make_keys.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_keys_is_up_to_date(make_keys: ModuleType) -> None:
    assert (ROOT / "docs" / "keys.md").read_text() == make_keys.page(), "make reference"


def test_the_page_has_every_option_of_every_mixer(make_keys: ModuleType) -> None:
    page = make_keys.page()
    for kind, spec in SPECS.items():
        section = page.split(f"### kind: {kind}\n")[1].split("\n### ")[0]
        keys = {line.split("`")[1].partition(".")[0] for line in section.splitlines() if line.startswith("| `")}
        assert [f.name for f in dataclasses.fields(spec) if f.name not in keys] == []


def test_choices_of_a_key_are_its_type(make_keys: ModuleType) -> None:
    (row,) = re.findall(r"^\| `optim\.schedule` \|.*$", make_keys.page(), re.MULTILINE)
    assert row.split(" | ")[1].split(", ") == [f"`{name}`" for name in SHAPES]


def test_comments_of_keys_are_read_from_the_line_or_above(make_keys: ModuleType) -> None:
    source = 'class Some:\n    a: int = 1  # first\n    # second\n    # third\n    b: str = "#"\n    c: int = 2\n'
    assert make_keys.own_comments(source) == {"a": "first", "b": "second third", "c": ""}
