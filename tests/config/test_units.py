"""Amounts as people write them."""

from __future__ import annotations

import re

import pytest

from hybridtron.config.units import parse_share, parse_steps, parse_tokens, readable


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("20B", 20 * 10**9),
        ("3.2T", 3_200_000_000_000),
        (" 4m ", 4_000_000),
        ("1_000", 1000),
        ("256", 256),
        ("2e6", 2_000_000),
        ("1.5 K", 1500),
        ("0", 0),
    ],
)
def test_token_counts_are_parsed(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "B", "-3", "20G", "1%", "1e999", "nan", "inf", "4 4", "1.M"])
def test_texts_that_are_no_token_counts_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_tokens(text)


@pytest.mark.parametrize(("text", "tokens"), [("1%", 200), ("12.5 %", 2500), ("0%", 0), ("300%", 60_000), ("5K", 5000)])
def test_shares_and_token_counts_are_parsed(text, tokens):
    assert parse_share(text, 20_000) == tokens


@pytest.mark.parametrize("text", ["%", "x%", "-1%", "nan%", "inf%", "1%%", "one"])
def test_texts_that_are_no_shares_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_share(text, 100)


@pytest.mark.parametrize(("text", "steps"), [("1000", 1000), ("1M", 10), ("1.01M", 11), ("1K", 1), ("0", 0)])
def test_token_counts_become_steps(text, steps):
    assert parse_steps(text, 100_000) == steps


@pytest.mark.parametrize(
    ("amount", "text"), [(421_793_280, "421.8M"), (3.2e12, "3.2T"), (12, "12"), (1000, "1K"), (0.5, "0.5")]
)
def test_large_numbers_are_shortened(amount, text):
    assert readable(amount) == text
