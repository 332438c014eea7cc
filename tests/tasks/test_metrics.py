"""Metrics, counted by hand."""

from __future__ import annotations

import pytest

from hybridtron.tasks.metrics import (
    character_accuracy,
    cleaned,
    exact_match,
    f1,
    first_integer,
    string_match_all,
    string_match_part,
)


@pytest.mark.parametrize(
    ("answer", "outputs", "all_of", "part"),
    [
        ("1234567, and 7654321.", ["1234567", "7654321"], 1.0, 1.0),
        ("1234567", ["1234567", "7654321", "1111111", "2222222"], 0.25, 1.0),
        ("The ANSWER is Blue", ["blue", "red"], 0.5, 1.0),
        ("nothing", ["one"], 0.0, 0.0),
        ("someone", ["one"], 1.0, 1.0),  # a part of a word counts, as in RULER
        ("two\x00words", ["two\nwords"], 1.0, 1.0),  # control characters are newlines
        ("", ["x"], 0.0, 0.0),
    ],
)
def test_string_match_counts_wanted_strings(answer: str, outputs: list[str], all_of: float, part: float) -> None:
    assert string_match_all(answer, outputs) == all_of
    assert string_match_part(answer, outputs) == part


def test_control_characters_around_an_answer_are_removed() -> None:
    assert cleaned(" \x01 a\tb \x02 ") == "a\nb"


@pytest.mark.parametrize(
    ("answer", "outputs", "expected"),
    [
        ("The cat sat.", ["a cat sat"], 1.0),  # articles and the period don't count
        ("the cat", ["cat sat down"], 0.5),  # 1 shared of 1 and 3 words: 2 / 4
        ("cat cat", ["cat"], 2 / 3),  # 1 shared of 2 and 1
        ("dog", ["cat", "a dog runs"], 2 / 3),  # the best of all outputs
        ("", ["cat"], 0.0),
        ("bird", ["cat"], 0.0),
    ],
)
def test_f1_counts_common_words(answer: str, outputs: list[str], expected: float) -> None:
    assert f1(answer, outputs) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(" 12345.", 1.0), ("It is 12345, not 9", 1.0), ("9 12345", 0.0), ("123456", 0.0), ("012345", 1.0), ("none", 0.0)],
)
def test_the_first_integer_of_an_answer_counts(answer: str, expected: float) -> None:
    assert first_integer(answer, 12345) == expected


def test_integers_of_any_length_are_read() -> None:
    assert first_integer("9" * 5000, 12345) == 0
    assert first_integer("0" * 5000 + "12345", 12345) == 1
    assert first_integer("000", 0) == 1


def test_exact_match_ignores_surrounding_space() -> None:
    assert exact_match(" yes\n", ["yes"]) == 1.0
    assert exact_match("Yes", ["yes"]) == 0.0
    assert exact_match("yes.", ["yes"]) == 0.0


def test_character_accuracy_compares_equal_places() -> None:
    assert character_accuracy("abcd", "abcd") == 1.0
    assert character_accuracy("abxd", "abcd") == 0.75
    assert character_accuracy("bcd", "abcd") == 0.0
    assert character_accuracy("ab", "abcd") == 0.5
    assert character_accuracy("abcdefg", "abcd") == 1.0
