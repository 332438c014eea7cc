"""YAML's aliases count as the values that they repeat: how deep, and how much."""

from __future__ import annotations

import pytest
import yaml

from hybridtron.nested import DEEPEST, MAX_REPEATED, NotParsed, yaml_of


def chain(levels: int) -> str:
    """Return a list whose last entry is `levels` deep, itself included, by aliases alone."""
    return "- &a1 [1]\n" + "".join(f"- &a{n} [*a{n - 1}]\n" for n in range(2, levels + 1))


def test_chained_aliases_may_be_as_deep_as_brackets() -> None:
    """The outer list is one level more."""
    assert yaml_of(chain(DEEPEST - 1)) == yaml.safe_load(chain(DEEPEST - 1))
    assert yaml_of("[" * DEEPEST + "]" * DEEPEST) is not None
    with pytest.raises(NotParsed, match=r"100 deep.*\*a99"):
        yaml_of(chain(DEEPEST))
    with pytest.raises(NotParsed, match="100 deep"):
        yaml_of("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1))


def test_scalar_may_be_repeated_to_a_megabyte() -> None:
    """Each repetition counts one character more than the text has."""
    text = "x" * 1023
    times = MAX_REPEATED // 1024
    entries = ", ".join(["*a"] * times)
    assert yaml_of(f"[&a {text}, {entries}]") == [text] * (times + 1)
    with pytest.raises(NotParsed, match=r"\*a.*1,048,576"):
        yaml_of(f"[&a {text}, {entries}, *a]")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("{a: &x {b: 1}, c: *x}", {"a": {"b": 1}, "c": {"b": 1}}),
        ("{a: &x {b: 1}, c: {<<: *x, d: 2}}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("[&x same, [*x, *x]]", ["same", ["same", "same"]]),
    ],
)
def test_small_aliases_are_parsed(text: str, parsed: object) -> None:
    assert yaml_of(text) == parsed


@pytest.mark.parametrize("text", ["&a [*a]", "&a [[*a]]", "&a {b: *a}"])
def test_value_within_itself_is_refused(text: str) -> None:
    with pytest.raises(NotParsed, match=r"\*a.*itself"):
        yaml_of(text)


def test_undefined_alias_is_refused_with_its_line() -> None:
    with pytest.raises(NotParsed, match=r"(?s)undefined.*line 2"):
        yaml_of("a: 1\nb: *c\n")
