"""The rules of `data` that can be checked without looking at the data itself."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator

from hybridtron.config.phase_schema import PhaseDataConfig
from hybridtron.config.rules import path_problems
from hybridtron.config.schema import Config, DataConfig, Feed
from hybridtron.config.units import parse_bytes, parse_tokens
from hybridtron.problems import Problem


def data_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the keys of `data`, and with what the phases change in it."""
    data = config.data
    yield from path_problems("data.cache", data.cache)
    yield from _unreadable("data.shuffle", data.shuffle, parse_tokens)
    if data.cache_limit is not None:
        yield from _unreadable("data.cache_limit", data.cache_limit, parse_bytes)
    for key, value, least in (
        ("workers", data.workers, 0),
        ("prefetch", data.prefetch, 1),
        ("retries", data.retries, 0),
    ):
        if value < least:
            yield Problem(f"data.{key}", f"is {value}, must be at least {least}")
    if not 0 < data.timeout < math.inf:
        yield Problem("data.timeout", f"is {data.timeout}, must be a number of seconds above 0")
    if data.feed is Feed.dali and not _found("nvidia.dali"):
        yield Problem("data.feed", "is dali, which is not installed: `make setup-dali` adds it, or use data.feed=torch")
    yield from _epochs("data", data)
    yield from _sources("data", data)
    for index, phase in enumerate(config.phases):
        yield from _epochs(f"phases.{index}.data", phase.data)
        yield from _sources(f"phases.{index}.data", phase.data)


def _epochs(where: str, data: DataConfig | PhaseDataConfig) -> Iterator[Problem]:
    if data.epochs is not None and not 0 < data.epochs < math.inf:
        yield Problem(f"{where}.epochs", f"is {data.epochs}, must be above 0, or null for any number")


def _sources(where: str, data: DataConfig | PhaseDataConfig) -> Iterator[Problem]:
    """The folders that are read, and the weights of a mixture."""
    yield from path_problems(f"{where}.path", data.path)
    for name, ingredient in (data.mixture or {}).items():
        yield from path_problems(f"{where}.mixture.{name}.path", ingredient.path)
        if not 0 < ingredient.weight < math.inf:
            cure = "must be a number above 0; weights need not add up to anything"
            yield Problem(f"{where}.mixture.{name}.weight", f"is {ingredient.weight}, {cure}")


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def _unreadable(key: str, text: str, parse: Callable[[str], int]) -> Iterator[Problem]:
    try:
        if parse(text) < 1:
            yield Problem(key, f"is {text}, must be above 0")
    except ValueError as error:
        yield Problem(key, str(error))
