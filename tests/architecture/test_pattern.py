"""The pattern language: its expansions, and the position of the caret in each error."""

from __future__ import annotations

import pytest

from hybridtron.architecture.pattern import MAX_LETTERS, PatternError, parse

LETTERS = "MW-"


@pytest.mark.parametrize(
    ("text", "letters", "stages"),
    [
        ("M", "M", (1,)),
        ("(M-W-)*6", "M-W-" * 6, (24,)),
        ("M*3(W-)*2|M-", "MMMW-W-M-", (7, 2)),
        ("M-|W-|M", "M-W-M", (2, 2, 1)),
        ("(M-|W-)*2", "M-W-M-W-", (2, 4, 2)),
        ("((M*2W)*2-)*2", "MMWMMW-" * 2, (14,)),
        (" M * 2\n( W - ) ", "MMW-", (4,)),
        ("(M)*1", "M", (1,)),
        ("M*03", "MMM", (3,)),
        (f"M*{MAX_LETTERS}", "M" * MAX_LETTERS, (MAX_LETTERS,)),
    ],
)
def test_patterns_expand_to_letters_and_stages(text, letters, stages):
    pattern = parse(text, LETTERS)
    assert "".join(pattern.letters) == letters
    assert pattern.stages == stages


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("  ", 0),
        ("M-X-", 2),
        ("(M-W", 0),
        ("M(W(-)", 1),
        ("M-)", 2),
        ("M()W", 2),
        ("*3", 0),
        ("M|*3", 2),
        ("M*2*3", 3),
        ("M*W", 1),
        ("M*", 1),
        ("W-M*0", 3),
        ("|M", 0),
        ("M||W", 2),
        ("M-|", 2),
        ("(M|)*2", 2),
        (f"WM*{MAX_LETTERS + 1}", 2),
        ("M*" + "9" * 5000, 1),
        ("((M*100)*100)*100", 13),
        (f"M*{MAX_LETTERS}(WM)", 8),
        ("M-\nX", 3),
    ],
)
def test_errors_point_at_the_wrong_character(text, position):
    with pytest.raises(PatternError) as caught:
        parse(text, LETTERS)
    _, shown, caret = str(caught.value).split("\n")
    assert shown == text.replace("\n", " ")
    assert caret == " " * position + "^"
