"""Parse and format amounts with units: `20B` tokens, `500GB`, `1%` of a schedule."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_AMOUNT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([KMBT]?)\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
FORMS = "a number of tokens such as 4M, 20B or 3.2T"


def parse_tokens(text: str) -> int:
    """Parse a token count: `20B` -> 20000000000. Raises ValueError if the text has another form."""
    match = _AMOUNT.fullmatch(text)
    if match:
        amount = float(match[1].replace("_", "")) * _UNITS[match[2].upper()]
    else:
        amount = math.inf
    if math.isinf(amount):
        raise ValueError(f"{text!r} is not {FORMS}")
    return round(amount)


def parse_bytes(text: str) -> int:
    """Parse bytes with decimal units: `500GB` -> 500000000000. Raises ValueError if the text has another form."""
    amount = text.strip().upper().removesuffix("B")
    units = {"G": "B", "M": "M", "K": "K", "T": "T"}
    try:
        return parse_tokens(amount[:-1] + units[amount[-1]] if amount[-1:] in units else amount)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of bytes such as 64MB, 500GB or 2TB") from None


def parse_share(text: str, whole: int) -> int:
    """Parse a token count, or a share of `whole` tokens: `1%` of 20B -> 200000000.

    Raises ValueError if the text has another form.
    """
    if match := _SHARE.fullmatch(text):
        return round(min(float(match[1]) / 100, 1e6) * whole)
    try:
        return parse_tokens(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a share such as 1% nor {FORMS}") from None


def parse_steps(text: str, tokens_per_step: int) -> int:
    """Parse a step count (`1000`), or convert a token count with a unit (`4M`) to steps.

    The conversion rounds up. Raises ValueError if the text has another form.
    """
    try:
        amount = parse_tokens(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a number of steps such as 1000 nor {FORMS}") from None
    if text.strip()[-1].isdigit():
        return amount
    return max(1, math.ceil(amount / tokens_per_step))


def readable(amount: float) -> str:
    """Format an amount with a unit: 421793280 -> `421.8M`."""
    for unit in ("T", "B", "M", "K"):
        if abs(amount) >= _UNITS[unit]:
            return f"{amount / _UNITS[unit]:.4g}{unit}"
    return f"{amount:.4g}"
