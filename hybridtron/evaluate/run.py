"""An evaluation of one checkpoint from start to end: what is asked is checked, then measured, then written.

    samples.jsonl       a line a sample; a killed evaluation continues after the last one
    results.json        a row for each task, length and metric, with all that it was measured with
    *.jsonl, *.png      of the instruments; heat maps of tasks with a depth, and lines by length
    index.html          all of it on one page

Every process of the launch comes here; the first one writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hybridtron import __version__
from hybridtron.device import compute_device
from hybridtron.evaluate import perplexity
from hybridtron.evaluate.answers import ask
from hybridtron.evaluate.held_out import as_trained, read_text
from hybridtron.evaluate.instruments import INSTRUMENTS, TOLERANCE, verdict, written
from hybridtron.evaluate.length import attention_at_eval
from hybridtron.evaluate.page import page
from hybridtron.evaluate.pictures import by_length, entropy_curves, heat_map, position_curves
from hybridtron.evaluate.records import Line, Records
from hybridtron.evaluate.results import Evaluated, Row, by_length_rows, rows_of
from hybridtron.evaluate.served import Served
from hybridtron.evaluate.suites import Suite, fitting, suite_of
from hybridtron.model.steps import unsupported_reason
from hybridtron.ops.registry import choices
from hybridtron.parallel.groups import barrier
from hybridtron.problems import Unusable
from hybridtron.requirements import is_there
from hybridtron.storage.digest import digest_of
from hybridtron.tasks.base import TextTokens
from hybridtron.tasks.tokens import open_tokens
from hybridtron.train.records import read_lines, write_whole

CURVES = {"positions": "perplexity by position", "entropy": "entropy by layer"}
Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class Wishes:
    """What the command line says: a suite's keys, whether it is a named one, and what replaces parts of it."""

    asked: Mapping[str, Any]
    named: bool
    lengths: list[str] | None = None
    samples: int | None = None
    batch: int = 16
    rows: int = 8
    data: str | None = None
    seq_len: int | None = None


def evaluate(model: Served, name: str, wishes: Wishes, output: Path, bar: Bar) -> Evaluated:
    """Measure what is not recorded yet, and write."""
    config, seq_len = as_trained(model.folder, model.config, model.step, wishes.seq_len)
    model = replace(model, config=config)
    tokens = open_tokens(str(model.folder))
    if (largest := model.tokenizer.get_vocab_size()) > (size := config.model.vocab_size):
        fault = f"its tokenizer.json has {largest} tokens, model.vocab_size is {size}"
        raise Unusable(f"{model.folder}: {fault}: this tokenizer is not the model's")
    suite = suite_of(wishes.asked, seq_len, wishes.lengths, wishes.samples)
    suite = fitting(suite, tokens, size, lenient=wishes.named)
    where = partial(perplexity.rows_of, model.folder, config.data, seq_len=seq_len, path=wishes.data)
    texts = [(one, *where(one)) for one in suite.perplexities]
    records = opened(model, output, about(model, tokens, seq_len))
    with bar("tasks") as moved:
        ask(model, suite.cells, tokens, records, wishes.batch, moved)
    for one, rows_BT, described in texts:
        with bar(f"{one.label} {one.length}") as moved:
            perplexity.measure(model, one, rows_BT, described, records, wishes.batch, moved)
    if model.replica == 0:
        _instruments(model, suite, seq_len, wishes, output, records, bar)
    return finished(name, suite, records, output, seq_len) if model.first else Evaluated(name, output, {}, [], [])


def opened(model: Served, output: Path, header: Mapping[str, Any]) -> Records:
    """What was recorded; the first process makes the file whole before the others read it."""
    file = output / "samples.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    if model.alone:
        return Records(file, header)
    own = Records(file, header) if model.first else None
    barrier()
    return own or Records(file, header, writes=False)


def about(model: Served, tokens: TextTokens, seq_len: int) -> dict[str, Any]:
    """What every number is measured with."""
    device = compute_device().type
    return {
        "checkpoint": digest_of((model.folder / "manifest.json").read_bytes()),
        "step": model.step,
        "seq_len": seq_len,
        "tokenizer": tokens.digest,
        "dtype": str(model.config.precision.name),
        "attention": attention_at_eval(model.config.model),
        "kernels": {op: form for op, form, _ in choices(device)},
        "decoding": "model" if model.read.model is None or unsupported_reason(model.read.model) else "compiled",
        "device": device,
        "hybridtron": __version__,
    }


def _instruments(
    model: Served, suite: Suite, seq_len: int, wishes: Wishes, output: Path, records: Records, bar: Bar
) -> None:
    """Each one's files; a line in the records says that they are there. One replica measures."""
    length = suite.instrument_length
    for name in suite.instruments:
        key = f"{name}/{length}/{wishes.rows}"
        if key in records and (output / f"{name}.jsonl").exists():
            continue
        text = read_text(model.folder, model.config.data, seq_len, wishes.data, length, wishes.rows)
        with bar(name) as moved:
            table = written(name, model.read, model.config, text, model.first, output, moved)
        if table is not None:
            records.add(
                [{"key": key, "task": name, "length": length, "rows": len(text.tokens_BT), "text": text.described}]
            )


def finished(name: str, suite: Suite, records: Records, output: Path, seq_len: int) -> Evaluated:
    """Results, pictures and page, of all that is recorded."""
    lines = list(records.lines.values())
    rows = rows_of(lines, records.about) + _verdict(lines, records, output, seq_len)
    write_whole(output / "results.json", json.dumps({"rows": rows, "left_out": suite.left_out}, indent=1) + "\n")
    one = Evaluated(name, output, records.about, rows, lines, suite.left_out)
    if is_there("matplotlib"):
        draw_all(one, seq_len)
    write_whole(output / "index.html", page(name, [one]))
    return one


def _verdict(lines: Iterable[Line], records: Records, output: Path, seq_len: int) -> list[Row]:
    """Whether perplexity is no worse beyond the training length than within it, where that was measured."""
    measured = [line for line in lines if line["task"] == "positions"]
    by_position = read_lines(output / "positions.jsonl") if measured else []
    found = verdict(by_position, seq_len)
    if found is None:
        return []
    place: Row = {"task": "length generalization", "length": len(by_position), "metric": "holds"}
    value: Row = {"value": float(found.holds), "standard_error": None, "n": measured[-1]["rows"], "seed": None}
    return [{**place, **value, **found._asdict(), "tolerance": TOLERANCE, "about": records.about}]


def draw_all(one: Evaluated, seq_len: int) -> None:
    """The pictures of an evaluation, by their titles."""
    tasks = by_length_rows(one.rows)
    for task, rows in tasks.items():
        if "by_depth" in rows[0]:
            file = one.folder / f"{re.sub(r'[^a-z0-9_]+', '-', task).strip('-')}_depth.png"
            heat_map(task, rows, seq_len, file)
            one.pictures[f"{task} by depth and length"] = file
    if tasks:
        by_length({one.name: tasks}, [seq_len], one.folder / "by_length.png")
        one.pictures["by length"] = one.folder / "by_length.png"
    for name in INSTRUMENTS:
        if (file := one.folder / f"{name}.png").exists():
            one.pictures[name] = file


def compared(title: str, evaluations: list[Evaluated], output: Path) -> None:
    """Results and page of several checkpoints."""
    rows: list[Row] = [{"run": one.name, **row} for one in evaluations for row in one.rows]
    write_whole(output / "results.json", json.dumps({"rows": rows}, indent=1) + "\n")
    pictures: list[tuple[str, bytes]] = []
    if is_there("matplotlib"):
        seq_lens = [one.about["seq_len"] for one in evaluations]
        file = output / "by_length.png"
        if any(by_length_rows(one.rows) for one in evaluations):
            by_length({one.name: by_length_rows(one.rows) for one in evaluations}, seq_lens, file)
            pictures.append(("by length", file.read_bytes()))
        curves = {"positions": partial(position_curves, seq_lens=seq_lens), "entropy": entropy_curves}
        for name, draw_curves in curves.items():
            of_runs = {one.name: read_lines(one.folder / f"{name}.jsonl") for one in evaluations}
            if all(of_runs.values()):
                file = output / f"{name}.png"
                draw_curves(of_runs, output=file)
                pictures.append((CURVES[name], file.read_bytes()))
    write_whole(output / "index.html", page(title, evaluations, pictures))
