"""An evaluation's results: a row (dict) for each task, length and metric, computed from the lines of samples.jsonl.

Most rows have the mean over samples (`value`), its standard error, and the sample count (`n`). The field `about` has
the measurement's conditions, such as tokenizer, dtype and kernels.

A mean's standard error is the standard deviation (with divisor n - 1) divided by sqrt(n). A perplexity's standard error
is the perplexity times the standard error of the mean loss.

In a row, `task` is the task's name, which may be followed by options, such as `niah_single_2[essay=files:DIR]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hybridtron.evaluate.instruments import InstrumentTable
from hybridtron.evaluate.sample_log import Line
from hybridtron.tasks import RULER_SE_GROUPS

Row = dict[str, Any]
EFFECTIVE = 0.856  # RULER's threshold: the score of Llama-2-7B at 4096 tokens
SCALES = ("tokens", "holds")  # metrics that have one value for all lengths together; charts by length omit them
AVERAGES = {**RULER_SE_GROUPS, "ruler_se": tuple(name for names in RULER_SE_GROUPS.values() for name in names)}


@dataclass(frozen=True)
class Evaluated:
    """A checkpoint's results.

    name: the run's or checkpoint's name in titles and legends
    folder: the folder with the result files
    about: the measurement's conditions
    rows: a row for each task, length and metric
    lines: the lines in samples.jsonl
    left_out: the suite's parts that were not measured, with reasons
    pictures: title -> chart file
    tables: instrument's name -> its table
    """

    name: str
    folder: Path
    about: Mapping[str, Any]
    rows: Sequence[Row]
    lines: Sequence[Line]
    left_out: Sequence[str] = ()
    pictures: dict[str, Path] = field(default_factory=dict)
    tables: Mapping[str, InstrumentTable] = field(default_factory=dict)


def rows_of(lines: Iterable[Line], about: Mapping[str, Any]) -> list[Row]:
    """Compute a row for each task, length and metric, and then the rows with RULER's averages and effective lengths.

    Tasks and lengths are in the order of their first lines, and metrics in the task's order.
    """
    lines_by_cell: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        lines_by_cell.setdefault((line["task"], line["length"]), []).append(line)
    rows = []
    for (task, length), cell_lines in lines_by_cell.items():
        cell = {"task": task, "length": length}
        if "metrics" in cell_lines[0]:
            rows += [cell | row for row in _scored(cell_lines)]
        elif "nats" in cell_lines[0]:
            rows += [cell | row for row in _perplexity(cell_lines)]
    rows += averages(rows)
    return [row | {"about": dict(about)} for row in [*rows, *effective_lengths(rows)]]


def _scored(lines: Sequence[Line]) -> Iterable[Row]:
    """Compute a row for each metric of a task at one length.

    If the task has depths, `by_depth` has depth, mean and sample count for each depth. The depth is the position in the
    text of the sentence that the model must find, from 0 (start) to 1 (end).
    """
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
    """Compute the rows for perplexity, loss and bits per byte at one length."""
    nats, tokens, num_bytes = (sum(line[key] for line in lines) for key in ("nats", "tokens", "bytes"))
    error = mean_of([line["nats"] / line["tokens"] for line in lines])["standard_error"]
    # the evaluated pieces of text are not drawn at random, so there is no seed
    common: Row = {"n": len(lines), "tokens": tokens, "text": lines[0]["text"], "seed": None}
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
    """Return a row's fields `value` (the mean), `standard_error` (None for a single value) and `n`."""
    if len(values) > 1:
        error = stdev(values) / math.sqrt(len(values))
    else:
        error = None
    return {"value": fmean(values), "standard_error": error, "n": len(values)}


def scaled(error: float | None, factor: float) -> float | None:
    """Multiply a standard error by a factor; return None if there is no standard error."""
    if error is None:
        return None
    return error * factor


def averages(rows: Sequence[Row]) -> list[Row]:
    """Average each group of at least two RULER tasks, and all eleven tasks, at each length. All tasks weigh equally.

    If tasks were measured with options, each distinct option string, such as `[essay=files:DIR]`, has its own averages.
    If a task of the group has no row with these options, its row without options is used instead. For example, `vt` has
    no option `essay`. There is no average for a length at which a task has neither row.
    """
    by_cell = {(row["task"], row["length"]): row for row in rows if row["metric"] == "string_match_all"}
    options = dict.fromkeys(_options(task) for task, _ in by_cell)
    average_rows = []
    for length in dict.fromkeys(length for _, length in by_cell):
        for group, names in AVERAGES.items():
            for group_options in options:
                with_options = [by_cell.get((f"{name}{group_options}", length)) for name in names]
                task_rows = [row or by_cell.get((name, length)) for row, name in zip(with_options, names, strict=True)]
                if len(names) > 1 and any(with_options) and all(task_rows):
                    rows_of_group = [row for row in task_rows if row]
                    average_rows.append(
                        {"task": f"average of {group}{group_options}", "length": length, **_average(rows_of_group)}
                    )
    return average_rows


def _options(task: str) -> str:
    """Return the option string in a task's label, such as `[essay=files:DIR]`; an empty string without options."""
    if "[" in task:
        return task[task.index("[") :]
    return ""


def _average(rows: Sequence[Row]) -> Row:
    """Compute the mean over the rows of a group's tasks.

    The mean's standard error is computed as if the tasks' errors were independent.
    """
    error = math.hypot(*(row["standard_error"] or 0.0 for row in rows)) / len(rows)
    value = fmean(row["value"] for row in rows)
    count = sum(row["n"] for row in rows)
    mean = {"metric": rows[0]["metric"], "value": value, "standard_error": error}
    return {**mean, "n": count, "seed": rows[0]["seed"]}


def effective_lengths(rows: Sequence[Row]) -> list[Row]:
    """Compute RULER's effective length: the longest length at which its tasks' mean score is at least `EFFECTIVE`.

    The effective length is 0 if there is no such length. Each distinct option string has its own row.
    """
    by_options: dict[str, list[Row]] = {}
    for row in rows:
        if row["task"].partition("[")[0] == "average of ruler_se":
            by_options.setdefault(_options(row["task"]), []).append(row)
    effective_rows = []
    for options, average_rows in by_options.items():
        reached_lengths = [row["length"] for row in average_rows if row["value"] >= EFFECTIVE]
        longest = max(row["length"] for row in average_rows)
        cell = {"task": f"effective length{options}", "length": longest, "metric": "tokens"}
        about = {"n": len(average_rows), "seed": average_rows[0]["seed"], "threshold": EFFECTIVE}
        effective_rows.append({**cell, "value": max(reached_lengths, default=0), "standard_error": None, **about})
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
    """Return each task's rows for its first metric, sorted by length, for charts by length.

    Metrics with one value for all lengths (`SCALES`) are left out, and so are rows whose length is a label such as
    `5-shot`.
    """
    return main_rows([row for row in rows if row["metric"] not in SCALES and isinstance(row["length"], int)])


def shown(row: Row) -> str:
    """Format a row's value with its standard error, such as `0.850 ± 0.036`."""
    if row["standard_error"] is None:
        error = ""
    else:
        error = f" \N{PLUS-MINUS SIGN} {row['standard_error']:.3f}"
    return f"{row['value']:.3f}{error}"
