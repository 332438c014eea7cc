"""A sweep's file: the settings that all runs share, the settings that differ, and the metrics to compare.

    settings: [recipe=laptop, phases.0.tokens=1M]     as `hybridtron train` takes them
    variants:                                         optional: sets of settings by name
      samba: []
      swa: [model.pattern=(W-W-)*2]
      longer: {from: samba, settings: [recipe=...]}   starts from the weights of `samba`, at the same values;
                                                      samba@best: from its checkpoint of lowest held-out loss
    grid:                                             every combination is a run
      optim.decay_all: [0, 1]
      run.seed: [0, 1, 2]
    metrics: [loss, validation/1x]                    of metrics.jsonl, the last of each run

Runs that differ only in `run.seed` form a point, for which a mean and its standard error are reported.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridtron.config.asked import read_keys
from hybridtron.config.weights import folder_of
from hybridtron.problems import Unusable, did_you_mean

SEED = "run.seed"
MOST_RUNS = 10_000
KEYS = ("settings", "variants", "grid", "metrics")
DEFAULT_METRICS = ("loss", "validation/1x")


@dataclass(frozen=True)
class SweepRun:
    """One run in a sweep: its name, its variant, its values in the grid, and all its settings.

    `start` names the run whose weights it starts from: its best checkpoint with `best`, else its newest.
    """

    name: str
    variant: str
    values: Mapping[str, str]
    settings: tuple[str, ...]
    start: str | None = None
    best: bool = False

    @property
    def point(self) -> tuple[str, ...]:
        """The variant and values that identify this run's point: everything except the seed."""
        return self.variant, *(value for key, value in self.values.items() if key != SEED)


@dataclass(frozen=True)
class Sweep:
    """A sweep's runs, the keys in its grid (`axes`), and the metrics to compare."""

    runs: tuple[SweepRun, ...]
    axes: tuple[str, ...]
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """Named settings, and the variant whose newest (or best) weights its runs start from."""

    name: str
    settings: tuple[str, ...]
    start: str | None = None
    best: bool = False


@dataclass
class _File:
    """A sweep's file while it is parsed. Every method raises Unusable with the name of the faulty part."""

    path: Path
    parts: dict[str, Any] = field(default_factory=dict)

    def wrong(self, part: str, message: str) -> Unusable:
        """Build the exception for a faulty part."""
        return Unusable(f"{self.path}: {part}: {message}", code="malformed")

    def settings(self, part: str, given: Any) -> tuple[str, ...]:
        """Check that a part is a list with entries key=value, and none for run.dir."""
        if not isinstance(given, list) or not all(isinstance(text, str) and "=" in text for text in given):
            raise self.wrong(part, f"is {given!r}, must be a list of key=value, such as [recipe=laptop]")
        for text in given:
            if text.startswith("run.dir="):
                raise self.wrong(part, "sets run.dir, which is each run's own: --output names the sweep's folder")
        return tuple(given)

    def variants(self) -> list[Variant]:
        """Parse the variants; a file without any has a single one with an empty name."""
        variants = []
        if self.parts.get("variants") is None:
            by_name = {"": []}
        else:
            by_name = self.parts["variants"]
        if not isinstance(by_name, dict) or not by_name:
            raise self.wrong("variants", "must be settings by name, such as `samba: [recipe=laptop]`")
        for name, value in by_name.items():
            part = f"variants.{name}"
            start_name = None
            if not isinstance(name, str | int):
                raise self.wrong(part, "must have a name that is a text")
            if isinstance(value, dict):
                if unknown := sorted(set(value) - {"from", "settings"}):
                    raise self.wrong(part, f"has {unknown[0]!r}; it can have `from` and `settings`")
                value, start_name = value.get("settings", []), value.get("from")
            if start_name is None:
                start = None
            else:
                start = folder_of(str(start_name))
            if start is not None and start not in [earlier.name for earlier in variants]:
                raise self.wrong(part, f"starts from {start!r}, which is not a variant before it")
            variants.append(Variant(str(name), self.settings(part, value), start, start != start_name))
        return variants

    def grid(self) -> dict[str, list[str]]:
        """Parse the grid: each key's values, as text."""
        if self.parts.get("grid") is None:
            grid = {}
        else:
            grid = self.parts["grid"]
        if not isinstance(grid, dict):
            raise self.wrong("grid", f"must be values by key, such as `{SEED}: [0, 1]`")
        for key, values in grid.items():
            if not isinstance(key, str):
                raise self.wrong("grid", f"has the key {key!r}, must have keys of the configuration such as {SEED}")
            if not isinstance(values, list) or not values:
                raise self.wrong(f"grid.{key}", f"is {values!r}, must be a list of values")
            if nested := [value for value in values if not _is_value(value)]:
                raise self.wrong(f"grid.{key}", f"has {nested[0]!r}, must have numbers, texts, or lists of these")
            texts = [_text(value) for value in values]
            if len(set(texts)) < len(texts):
                raise self.wrong(f"grid.{key}", "has a value twice")
        return {key: [_text(value) for value in values] for key, values in grid.items()}

    def metrics(self) -> tuple[str, ...]:
        """Parse the names of metrics."""
        names = self.parts.get("metrics", list(DEFAULT_METRICS))
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise self.wrong("metrics", f"is {names!r}, must be a list of names such as [loss, validation/1x]")
        return tuple(names)


def read(path: Path, settings: Sequence[str] = ()) -> Sweep:
    """Read a sweep from a file, and append `settings` to the settings of all runs.

    Raises Unusable for a faulty file.
    """
    parts = read_keys(path, KEYS)
    file = _File(path, parts)
    file_settings = file.settings("settings", [] if parts.get("settings") is None else parts["settings"])
    shared = (*file_settings, *file.settings("the command line", list(settings)))
    grid = file.grid()
    short = _short_names(list(grid))
    runs: dict[str, SweepRun] = {}
    for variant, values in itertools.product(file.variants(), itertools.product(*grid.values())):
        grid_values = dict(zip(grid, values, strict=True))
        parts_of_name = [f"{short[key]}={value}" for key, value in grid_values.items()]
        name = _name(variant.name, parts_of_name)
        if variant.start is None:
            start = None
        else:
            start = _name(variant.start, parts_of_name)
        settings = (*shared, *variant.settings, *(f"{key}={value}" for key, value in grid_values.items()))
        if name in runs:
            raise Unusable(f"{path}: two runs would have the name {name}", code="duplicate")
        runs[name] = SweepRun(name, variant.name, grid_values, settings, start, variant.best)
        if len(runs) > MOST_RUNS:
            raise Unusable(f"{path} has more than {MOST_RUNS:,} runs", code="out-of-range")
    return Sweep(tuple(runs.values()), tuple(grid), file.metrics())


def narrowed(sweep: Sweep, names: Collection[str] | None) -> Sweep:
    """Keep the runs with these names or variants (None: all), and the runs that they start from.

    Raises Unusable for a name that is neither.
    """
    runs = {run.name: run for run in sweep.runs}
    known = {*runs, *(run.variant for run in sweep.runs)} - {""}
    if unknown := sorted(set(names or ()) - known):
        have = ", ".join(sorted(known))
        raise Unusable(
            f"there is no variant or run {unknown[0]!r}{did_you_mean(unknown[0], known)}; has {have}",
            code="unknown-name",
        )
    chosen: set[str] = set()
    for run in sweep.runs:
        if names is None or run.variant in names or run.name in names:
            chosen.update(needed.name for needed in with_starts(run, runs))
    return replace(sweep, runs=tuple(run for run in sweep.runs if run.name in chosen))


def with_starts(run: SweepRun, runs: Mapping[str, SweepRun]) -> Iterator[SweepRun]:
    """Yield a run, then the run that it starts from, and so on."""
    yield run
    if run.start is not None:
        yield from with_starts(runs[run.start], runs)


def _is_value(value: Any) -> bool:
    """Return True for numbers, texts, null, and lists with such entries."""
    return not isinstance(value, dict | set | bytes) and (not isinstance(value, list) or all(map(_is_value, value)))


def _text(value: Any) -> str:
    """Write a value as it would be written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace(" ", "")


def _short_names(keys: list[str]) -> dict[str, str]:
    """Shorten each key to its last word, unless two keys share that word."""
    last_words = [key.rpartition(".")[2] for key in keys]
    return {key: key if last_words.count(word) > 1 else word for key, word in zip(keys, last_words, strict=True)}


def _name(variant: str, parts: list[str]) -> str:
    """Join a variant's name and its values into a valid folder name."""
    return re.sub(r"[^\w.=,+-]+", "_", "-".join([variant] * bool(variant) + parts)) or "run"
