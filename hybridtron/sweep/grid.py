"""A sweep's file: the settings that all runs share, the settings that differ, and the metrics to compare.

    settings: [recipe=laptop, phases.0.tokens=1M]     arguments of `hybridtron train` for all runs
    variants:                                         optional; additional settings under a name
      samba: []
      swa: [model.pattern=(W-W-)*2]
      longer: {from: samba, settings: [recipe=...]}   a run starts from the newest weights of the `samba` run that has
                                                      the same values for the grid's keys; `from: samba@best` selects
                                                      the weights with the lowest held-out loss instead
    grid:                                             a list of values for each key
      optim.decay_all: [0, 1]
      run.seed: [0, 1, 2]
    metrics: [loss, validation/1x]                    names in metrics.jsonl; the last value of each run is compared

Every combination of a variant with one value per grid key is a run: in this example 3 * 2 * 3 = 18 runs. Runs that
differ only in `run.seed` form a point, for which the mean and its standard error are reported.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridtron.config.weights import folder_of
from hybridtron.config.yaml_file import read_keys
from hybridtron.problems import Code, Unusable, did_you_mean

SEED = "run.seed"
MAX_RUNS = 10_000
KEYS = ("settings", "variants", "grid", "metrics")
DEFAULT_METRICS = ("loss", "validation/1x")
SETTINGS = "must be a list of key=value, such as [recipe=laptop]"
VARIANTS = "must be settings by name, such as `samba: [recipe=laptop]`"
METRICS = "must be a list of names such as [loss, validation/1x]"


@dataclass(frozen=True)
class SweepRun:
    """One run in a sweep.

    name: the run's name, made from the variant and the values
    variant: the variant's name; empty if the file has no variants
    values: the run's value for each key in the grid
    settings: arguments for `hybridtron train`, from the shared settings, the variant's settings and the grid
    start: name of the run whose weights this run starts from; None if the weights are initialized
    best: True to start from the best checkpoint of run `start`, False to start from its newest checkpoint
    """

    name: str
    variant: str
    values: Mapping[str, str]
    settings: tuple[str, ...]
    start: str | None = None
    best: bool = False

    @property
    def point(self) -> tuple[str, ...]:
        """The variant, and the values for all grid keys except the seed. Runs with equal tuples form a point."""
        return self.variant, *(value for key, value in self.values.items() if key != SEED)


@dataclass(frozen=True)
class Sweep:
    """A sweep's runs, the keys in its grid (`axes`), and the metrics to compare."""

    runs: tuple[SweepRun, ...]
    axes: tuple[str, ...]
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """A variant: settings under a name, and optionally the variant `start` from whose weights the runs start.

    If `best` is set, the runs start from the best checkpoints, otherwise from the newest checkpoints.
    """

    name: str
    settings: tuple[str, ...]
    start: str | None = None
    best: bool = False


@dataclass
class _File:
    """A sweep's file while it is parsed. The parsing methods raise Unusable, which names the faulty part."""

    path: Path
    parts: dict[str, Any] = field(default_factory=dict)

    def wrong(self, part: str, code: Code, message: str) -> Unusable:
        """Build the exception for a faulty part."""
        return Unusable(f"{self.path}: {part}: {message}", code=code)

    def settings(self, part: str, entries: Any) -> tuple[str, ...]:
        """Return a part's settings as a tuple. Each setting must be `key=value`, and no setting may set `run.dir`."""
        if not isinstance(entries, list) or not all(isinstance(text, str) for text in entries):
            raise self.wrong(part, "wrong-type", f"is {entries!r}, {SETTINGS}")
        for text in entries:
            if "=" not in text:
                raise self.wrong(part, "malformed", f"has {text!r}, {SETTINGS}")
            if text.startswith("run.dir="):
                message = "sets run.dir, but every run gets its own folder: set the sweep's folder with --output"
                raise self.wrong(part, "misplaced", message)
        return tuple(entries)

    def variants(self) -> list[Variant]:
        """Parse the variants. A file without variants has one variant, with an empty name and no settings."""
        variants = []
        if self.parts.get("variants") is None:
            by_name = {"": []}
        else:
            by_name = self.parts["variants"]
        if not isinstance(by_name, dict):
            raise self.wrong("variants", "wrong-type", VARIANTS)
        if not by_name:
            raise self.wrong("variants", "missing", VARIANTS)
        for name, value in by_name.items():
            part = f"variants.{name}"
            start_name = None
            if not isinstance(name, str | int):
                raise self.wrong(part, "wrong-type", "must have a text as its name")
            if isinstance(value, dict):
                if unknown := sorted(set(value) - {"from", "settings"}):
                    raise self.wrong(part, "unknown-name", f"has {unknown[0]!r}; it can have `from` and `settings`")
                value, start_name = value.get("settings", []), value.get("from")
            if start_name is None:
                start = None
            else:
                start = folder_of(str(start_name))
            if start is not None and start not in [earlier.name for earlier in variants]:
                message = f"starts from {start!r}, which must be the name of an earlier variant in the file"
                raise self.wrong(part, "unknown-name", message)
            variants.append(Variant(str(name), self.settings(part, value), start, start != start_name))
        return variants

    def grid(self) -> dict[str, list[str]]:
        """Parse the grid. Return each key's values as texts."""
        if self.parts.get("grid") is None:
            grid = {}
        else:
            grid = self.parts["grid"]
        if not isinstance(grid, dict):
            raise self.wrong("grid", "wrong-type", f"must be values by key, such as `{SEED}: [0, 1]`")
        for key, values in grid.items():
            if not isinstance(key, str):
                message = f"has the key {key!r}; keys must be texts such as {SEED}"
                raise self.wrong("grid", "wrong-type", message)
            part = f"grid.{key}"
            if not isinstance(values, list):
                raise self.wrong(part, "wrong-type", f"is {values!r}, must be a list of values")
            if not values:
                raise self.wrong(part, "missing", "is empty, must be a list of values")
            if nested := [value for value in values if not _is_value(value)]:
                raise self.wrong(part, "wrong-type", f"has {nested[0]!r}, must have numbers, texts, or lists of these")
            texts = [_text(value) for value in values]
            if len(set(texts)) < len(texts):
                raise self.wrong(part, "duplicate", "has a value twice: remove one of them")
        return {key: [_text(value) for value in values] for key, values in grid.items()}

    def metrics(self) -> tuple[str, ...]:
        """Parse the names of metrics; return the default metrics if the file names none."""
        names = self.parts.get("metrics", list(DEFAULT_METRICS))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.wrong("metrics", "wrong-type", f"is {names!r}, {METRICS}")
        if not names:
            raise self.wrong("metrics", "missing", f"is empty, {METRICS}")
        return tuple(names)


def read(path: Path, settings: Sequence[str] = ()) -> Sweep:
    """Read a sweep from a file, and append `settings` to all runs' settings.

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
            raise Unusable(
                f"{path}: two runs would have the name {name}: change a variant's name or a value", code="duplicate"
            )
        runs[name] = SweepRun(name, variant.name, grid_values, settings, start, variant.best)
        if len(runs) > MAX_RUNS:
            raise Unusable(f"{path} has more than {MAX_RUNS:,} runs: remove variants or values", code="out-of-range")
    return Sweep(tuple(runs.values()), tuple(grid), file.metrics())


def narrow(sweep: Sweep, names: Collection[str] | None) -> Sweep:
    """Return the sweep with only the runs that `names` selects; None selects all runs.

    `names` are names of runs or variants. If a selected run starts from another run's weights, the other run is kept
    too. Raises Unusable for an unknown name.
    """
    runs = {run.name: run for run in sweep.runs}
    known_names = {*runs, *(run.variant for run in sweep.runs)} - {""}
    if unknown := sorted(set(names or ()) - known_names):
        have = ", ".join(sorted(known_names))
        raise Unusable(
            f"there is no variant or run {unknown[0]!r}{did_you_mean(unknown[0], known_names)}; has {have}",
            code="unknown-name",
        )
    chosen: set[str] = set()
    for run in sweep.runs:
        if names is None or run.variant in names or run.name in names:
            chosen.update(needed.name for needed in with_starts(run, runs))
    return replace(sweep, runs=tuple(run for run in sweep.runs if run.name in chosen))


def with_starts(run: SweepRun, runs: Mapping[str, SweepRun]) -> Iterator[SweepRun]:
    """Yield a run, then the run from whose weights it starts, and so on."""
    yield run
    if run.start is not None:
        yield from with_starts(runs[run.start], runs)


def _is_value(value: Any) -> bool:
    """Return True for a number, a text, a boolean, null, or a list with such entries."""
    return not isinstance(value, dict | set | bytes) and (not isinstance(value, list) or all(map(_is_value, value)))


def _text(value: Any) -> str:
    """Return a value in the command line's syntax, such as `null`, `true` or `[1,2]`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace(" ", "")


def _short_names(keys: list[str]) -> dict[str, str]:
    """Return a short name for each key: its part after the last period, or the full key if two keys share that part."""
    last_words = [key.rpartition(".")[2] for key in keys]
    return {key: key if last_words.count(word) > 1 else word for key, word in zip(keys, last_words, strict=True)}


def _name(variant: str, parts: list[str]) -> str:
    """Join a variant's name and texts such as `seed=0` with hyphens into a run's name, which is a valid folder name."""
    return re.sub(r"[^\w.=,+-]+", "_", "-".join([variant] * bool(variant) + parts)) or "run"
