"""An evaluation's results: a row for each task, length and metric, computed from the recorded lines.

A row has the mean, its standard error, the number of samples, and the conditions that matter to it: tokenizer, dtype,
kernels, attention outside training, seed.

The standard error of a mean is the standard deviation (with n - 1) over the root of n. For a perplexity it is the
standard error of the rows' mean losses, times the perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hybridtron.evaluate.instruments import InstrumentTable
from hybridtron.evaluate.records import Line
from hybridtron.tasks import RULER_SE_GROUPS

Row = dict[str, Any]
EFFECTIVE = 0.856  # RULER's threshold: Llama-2-7B at 4096 tokens
SCALES = ("tokens", "holds")  # metrics over all lengths, which curves by length can't show
AVERAGES = {**RULER_SE_GROUPS, "ruler_se": tuple(name for names in RULER_SE_GROUPS.values() for name in names)}


@dataclass(frozen=True)
class Evaluated:
    """A checkpoint's results, with picture files by title and tables by instrument."""

    name: str
    folder: Path
    about: Mapping[str, Any]
    rows: Sequence[Row]
    lines: Sequence[Line]
    left_out: Sequence[str] = ()
    pictures: dict[str, Path] = field(default_factory=dict)
    tables: Mapping[str, InstrumentTable] = field(default_factory=dict)


def rows_of(lines: Iterable[Line], about: Mapping[str, Any]) -> list[Row]:
    """Compute the rows for all tasks and lengths, in the lines' order. A task's first metric comes first."""
    cells: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        cells.setdefault((line["task"], line["length"]), []).append(line)
    rows = []
    for (task, length), cell_lines in cells.items():
        place = {"task": task, "length": length}
        if "metrics" in cell_lines[0]:
            rows += [place | row for row in _scored(cell_lines)]
        elif "nats" in cell_lines[0]:
            rows += [place | row for row in _perplexity(cell_lines)]
    rows += averages(rows)
    return [row | {"about": dict(about)} for row in [*rows, *effective_lengths(rows)]]


def _scored(lines: Sequence[Line]) -> Iterable[Row]:
    """Compute a row for each metric, also by depth if the task has depths."""
    empty = sum(not line["written"].strip() for line in lines)
    for metric in lines[0]["metrics"]:
        values = [line["metrics"][metric] for line in lines]
        row: Row = {"metric": metric, **mean_of(values), "seed": lines[0]["seed"], "empty": empty}
        if "depth" in lines[0]:
            depths: dict[float, list[float]] = {}
            for line, value in zip(lines, values, strict=True):
                depths.setdefault(line["depth"], []).append(value)
            row["by_depth"] = [[depth, fmean(depths[depth]), len(depths[depth])] for depth in sorted(depths)]
        yield row


def _perplexity(lines: Sequence[Line]) -> Iterable[Row]:
    """Compute rows for perplexity, loss and bits per byte."""
    nats, tokens, num_bytes = (sum(line[key] for line in lines) for key in ("nats", "tokens", "bytes"))
    error = mean_of([line["nats"] / line["tokens"] for line in lines])["standard_error"]
    common: Row = {"n": len(lines), "tokens": tokens, "text": lines[0]["text"], "seed": None}  # fixed rows: no seed
    loss = nats / tokens
    yield {"metric": "perplexity", "value": math.exp(loss), "standard_error": scaled(error, math.exp(loss)), **common}
    yield {"metric": "loss", "value": loss, "standard_error": error, **common}
    if num_bytes:
        per_byte = tokens / num_bytes / math.log(2)
        yield {
            "metric": "bits_per_byte",
            "value": loss * per_byte,
            "standard_error": scaled(error, per_byte),
            **common,
            "bytes": num_bytes,
        }


def mean_of(values: Sequence[float]) -> Row:
    """Return mean, standard error (None for a single value) and the number of values."""
    if len(values) > 1:
        error = stdev(values) / math.sqrt(len(values))
    else:
        error = None
    return {"value": fmean(values), "standard_error": error, "n": len(values)}


def scaled(error: float | None, factor: float) -> float | None:
    """Scale a standard error; None stays None."""
    if error is None:
        return None
    return error * factor


def averages(rows: Sequence[Row]) -> list[Row]:
    """Average RULER's groups, and all eleven tasks, as plain means over tasks.

    A group has an average only if all its tasks were asked. Tasks are averaged with those that have the same options,
    and with those that have no such option: `vt` counts among needles with `[essay=files:DIR]`.
    """
    by_place = {(row["task"], row["length"]): row for row in rows if row["metric"] == "string_match_all"}
    options = dict.fromkeys(_options(task) for task, _ in by_place)
    average_rows = []
    for length in dict.fromkeys(length for _, length in by_place):
        for group, names in AVERAGES.items():
            for group_options in options:
                same = [by_place.get((f"{name}{group_options}", length)) for name in names]
                parts = [part or by_place.get((name, length)) for part, name in zip(same, names, strict=True)]
                if len(names) > 1 and any(same) and all(parts):
                    rows_of_group = [row for row in parts if row]
                    average_rows.append(
                        {"task": f"average of {group}{group_options}", "length": length, **_average(rows_of_group)}
                    )
    return average_rows


def _options(task: str) -> str:
    """Return the options in a label, such as `[essay=files:DIR]`, or an empty text."""
    if "[" in task:
        return task[task.index("[") :]
    return ""


def _average(rows: Sequence[Row]) -> Row:
    """Compute a mean over rows, and its standard error if tasks are independent."""
    error = math.hypot(*(row["standard_error"] or 0.0 for row in rows)) / len(rows)
    value = fmean(row["value"] for row in rows)
    count = sum(row["n"] for row in rows)
    mean = {"metric": rows[0]["metric"], "value": value, "standard_error": error}
    return {**mean, "n": count, "seed": rows[0]["seed"]}


def effective_lengths(rows: Sequence[Row]) -> list[Row]:
    """Compute RULER's effective length: the longest at which its tasks' mean reaches `EFFECTIVE`, or 0."""
    by_options: dict[str, list[Row]] = {}
    for row in rows:
        if row["task"].partition("[")[0] == "average of ruler_se":
            by_options.setdefault(_options(row["task"]), []).append(row)
    effective_rows = []
    for options, average_rows in by_options.items():
        reached_lengths = [row["length"] for row in average_rows if row["value"] >= EFFECTIVE]
        longest = max(row["length"] for row in average_rows)
        place = {"task": f"effective length{options}", "length": longest, "metric": "tokens"}
        about = {"n": len(average_rows), "seed": average_rows[0]["seed"], "threshold": EFFECTIVE}
        effective_rows.append({**place, "value": max(reached_lengths, default=0), "standard_error": None, **about})
    return effective_rows


def main_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return each task's rows for its first metric, sorted by length."""
    rows_by_task: dict[str, list[Row]] = {}
    for row in rows:
        task_rows = rows_by_task.setdefault(row["task"], [])
        if not task_rows or task_rows[0]["metric"] == row["metric"]:
            task_rows.append(row)
    return {task: sorted(task_rows, key=lambda row: row["length"]) for task, task_rows in rows_by_task.items()}


def by_length_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return each task's rows for its first metric, without metrics over all lengths and rows without a length."""
    return main_rows([row for row in rows if row["metric"] not in SCALES and isinstance(row["length"], int)])


def shown(row: Row) -> str:
    """Format a value with its standard error, such as `0.850 ± 0.036`."""
    if row["standard_error"] is None:
        error = ""
    else:
        error = f" \N{PLUS-MINUS SIGN} {row['standard_error']:.3f}"
    return f"{row['value']:.3f}{error}"
