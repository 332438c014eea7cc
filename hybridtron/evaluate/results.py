"""Lines of samples -> a row for each task, length and metric: mean, standard error, number of samples, and all else
that such a number means something with: tokenizer, data type, kernels, attention outside training, seed.

The standard error of a mean of n values is their standard deviation (n - 1) over the root of n; of a perplexity it is
that of the rows' mean losses, times the perplexity.
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
SCALES = ("tokens", "holds")  # metrics of all lengths together, which no line by length shows
AVERAGES = {**RULER_SE_GROUPS, "ruler_se": tuple(name for names in RULER_SE_GROUPS.values() for name in names)}


@dataclass(frozen=True)
class Evaluated:
    """The results of a checkpoint, with picture files by their titles and tables by instrument."""

    name: str
    folder: Path
    about: Mapping[str, Any]
    rows: Sequence[Row]
    lines: Sequence[Line]
    left_out: Sequence[str] = ()
    pictures: dict[str, Path] = field(default_factory=dict)
    tables: Mapping[str, InstrumentTable] = field(default_factory=dict)


def rows_of(lines: Iterable[Line], about: Mapping[str, Any]) -> list[Row]:
    """Of every task and length, in the order of the lines; the first metric of a task first."""
    cells: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        cells.setdefault((line["task"], line["length"]), []).append(line)
    found = []
    for (task, length), of_cell in cells.items():
        place = {"task": task, "length": length}
        if "metrics" in of_cell[0]:
            found += [place | row for row in _scored(of_cell)]
        elif "nats" in of_cell[0]:
            found += [place | row for row in _perplexity(of_cell)]
    found += averages(found)
    return [row | {"about": dict(about)} for row in [*found, *effective_lengths(found)]]


def _scored(lines: Sequence[Line]) -> Iterable[Row]:
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
    nats, tokens, size = (sum(line[key] for line in lines) for key in ("nats", "tokens", "bytes"))
    error = mean_of([line["nats"] / line["tokens"] for line in lines])["standard_error"]
    count: Row = {"n": len(lines), "tokens": tokens, "text": lines[0]["text"], "seed": None}  # the first rows there are
    loss = nats / tokens
    yield {"metric": "perplexity", "value": math.exp(loss), "standard_error": scaled(error, math.exp(loss)), **count}
    yield {"metric": "loss", "value": loss, "standard_error": error, **count}
    if size:
        per_byte = tokens / size / math.log(2)
        yield {
            "metric": "bits_per_byte",
            "value": loss * per_byte,
            "standard_error": scaled(error, per_byte),
            **count,
            "bytes": size,
        }


def mean_of(values: Sequence[float]) -> Row:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"value": fmean(values), "standard_error": error, "n": len(values)}


def scaled(error: float | None, factor: float) -> float | None:
    return None if error is None else error * factor


def averages(rows: Sequence[Row]) -> list[Row]:
    """RULER's groups, and all eleven tasks, where every task of a group was asked: plain means of tasks.

    Tasks with the same options belong together, and those that have no such option belong to them: `vt` to needles
    with `[essay=files:DIR]`.
    """
    by_place = {(row["task"], row["length"]): row for row in rows if row["metric"] == "string_match_all"}
    options = dict.fromkeys(_options(task) for task, _ in by_place)
    found = []
    for length in dict.fromkeys(length for _, length in by_place):
        for group, names in AVERAGES.items():
            for of_group in options:
                same = [by_place.get((f"{name}{of_group}", length)) for name in names]
                parts = [part or by_place.get((name, length)) for part, name in zip(same, names, strict=True)]
                if len(names) > 1 and any(same) and all(parts):
                    rows_of_group = [row for row in parts if row]
                    found.append({"task": f"average of {group}{of_group}", "length": length, **_average(rows_of_group)})
    return found


def _options(task: str) -> str:
    """`[essay=files:DIR]` of a label, or nothing."""
    return task[task.index("[") :] if "[" in task else ""


def _average(rows: Sequence[Row]) -> Row:
    error = math.hypot(*(row["standard_error"] or 0.0 for row in rows)) / len(rows)
    value, count = fmean(row["value"] for row in rows), sum(row["n"] for row in rows)
    of_value = {"metric": rows[0]["metric"], "value": value, "standard_error": error}
    return {**of_value, "n": count, "seed": rows[0]["seed"]}


def effective_lengths(rows: Sequence[Row]) -> list[Row]:
    """RULER's effective length: the longest asked at which the mean of its eleven tasks reaches `EFFECTIVE`, or 0."""
    by_options: dict[str, list[Row]] = {}
    for row in rows:
        if row["task"].partition("[")[0] == "average of ruler_se":
            by_options.setdefault(_options(row["task"]), []).append(row)
    found = []
    for options, asked in by_options.items():
        reached = [row["length"] for row in asked if row["value"] >= EFFECTIVE]
        longest = max(row["length"] for row in asked)
        place = {"task": f"effective length{options}", "length": longest, "metric": "tokens"}
        about = {"n": len(asked), "seed": asked[0]["seed"], "threshold": EFFECTIVE}
        found.append({**place, "value": max(reached, default=0), "standard_error": None, **about})
    return found


def main_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The first metric of each task, by length."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        of_task = found.setdefault(row["task"], [])
        if not of_task or of_task[0]["metric"] == row["metric"]:
            of_task.append(row)
    return {task: sorted(of_task, key=lambda row: row["length"]) for task, of_task in found.items()}


def by_length_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """`main_rows` without what is of all lengths together, or of none."""
    return main_rows([row for row in rows if row["metric"] not in SCALES and isinstance(row["length"], int)])


def shown(row: Row) -> str:
    """`0.850 ± 0.036`."""
    error = "" if row["standard_error"] is None else f" \N{PLUS-MINUS SIGN} {row['standard_error']:.3f}"
    return f"{row['value']:.3f}{error}"
