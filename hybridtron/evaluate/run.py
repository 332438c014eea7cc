"""The evaluation of one checkpoint from start to end: check the suite, measure, write results.

    samples.jsonl       a line for each sample; a killed evaluation continues after the last one
    results.json        a row for each task, length and metric, with the conditions that it was measured under
    *.jsonl, *.png      measurements and pictures: instruments, heat maps for tasks with a depth, curves by length
    index.html          everything on one page

All launched processes run this code; only the first one writes.
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
from hybridtron.evaluate.held_out import Text, as_trained, digest_of_data, read_text
from hybridtron.evaluate.instruments import INSTRUMENTS, TOLERANCE, table_of, verdict, written
from hybridtron.evaluate.length import attention_at_eval
from hybridtron.evaluate.page import page
from hybridtron.evaluate.pictures import by_length, entropy_curves, heat_map, position_curves
from hybridtron.evaluate.records import Line, Records, recorded
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
from hybridtron.train.report import ops_of

NO_LAYER = "nothing to measure, the model has no layer of that kind"
CURVES = {"positions": "perplexity by position", "entropy": "entropy by layer"}
Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class Wishes:
    """The command line's settings: a suite's definition, whether it is a named one, and overrides."""

    asked: Mapping[str, Any]
    named: bool
    lengths: list[str] | None = None
    samples: int | None = None
    batch: int = 16
    rows: int = 8
    data: str | None = None
    seq_len: int | None = None


def evaluate(model: Served, name: str, wishes: Wishes, output: Path, bar: Bar) -> Evaluated:
    """Evaluate a checkpoint with a suite, and write the results. Recorded samples are not measured again.

    All processes call this together; results are returned on the first one, and are empty on the others.
    """
    config, seq_len = as_trained(model.folder, model.config, model.step, wishes.seq_len)
    model = replace(model, config=config)
    tokens = open_tokens(str(model.folder))
    if (largest := model.tokenizer.get_vocab_size()) > (size := config.model.vocab_size):
        fault = f"its tokenizer.json has {largest} tokens, model.vocab_size is {size}"
        raise Unusable(f"{model.folder}: {fault}: this tokenizer is not the model's", code="mismatch")
    suite = suite_of(wishes.asked, seq_len, wishes.lengths, wishes.samples)
    suite = fitting(suite, tokens, size, lenient=wishes.named)
    read_rows = partial(perplexity.rows_of, model.folder, config.data, seq_len=seq_len, path=wishes.data)
    texts = [(wanted, *read_rows(wanted)) for wanted in suite.perplexities]
    header = about(model, tokens, seq_len)
    if wishes.data is not None:
        header["data"] = digest_of_data(config.data, wishes.data)
    text = _unread_text(model, suite, seq_len, wishes, output, header)
    records = opened(model, output, header)
    with bar("tasks") as moved:
        ask(model, suite.cells, tokens, records, wishes.batch, moved)
    for wanted, rows_BT, described in texts:
        with bar(f"{wanted.label} {wanted.length}") as moved:
            perplexity.measure(model, wanted, rows_BT, described, records, wishes.batch, moved)
    if model.replica == 0 and text is not None:
        _instruments(model, suite, wishes, text, output, records, bar)
    if model.first:
        return finished(name, suite, records, output, seq_len)
    return Evaluated(name, output, {}, [], [])


def opened(model: Served, output: Path, header: Mapping[str, Any]) -> Records:
    """Open the records, and load the samples that an earlier evaluation wrote.

    The first process removes an incomplete last line before the others read the file.
    """
    file = output / "samples.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    if model.alone:
        return Records(file, header)
    first_records = Records(file, header) if model.first else None
    barrier()
    return first_records or Records(file, header, writes=False)


def about(model: Served, tokens: TextTokens, seq_len: int) -> dict[str, Any]:
    """Return the measurement's conditions: checkpoint, tokenizer, dtype, kernels, attention and so on."""
    device = compute_device().type
    used_ops = ops_of(model.config.model)
    conditions: dict[str, Any] = {
        "step": model.step,
        "seq_len": seq_len,
        "attention": attention_at_eval(model.config.model),
        "dtype": str(model.config.precision.name),
        "device": device,
        "decoding": "model" if model.read.model is None or unsupported_reason(model.read.model) else "compiled",
        "kernels": {op: form for op, form, _ in choices(device) if op in used_ops},
        "hybridtron": __version__,
        "tokenizer": tokens.digest,
        "checkpoint": digest_of((model.folder / "manifest.json").read_bytes()),
    }
    layers = model.config.model.layers
    if extended := {letter: options["self_extend"] for letter, options in layers.items() if "self_extend" in options}:
        conditions["self_extend"] = extended
    return conditions


def _key(name: str, suite: Suite, wishes: Wishes) -> str:
    """Return an instrument's key in the records."""
    return f"{name}/{suite.instrument_length}/{wishes.rows}"


def _is_measured(key: str, name: str, lines: Iterable[Line], output: Path) -> bool:
    """Return True if an instrument was already measured with this key, which has its length and row count."""
    newest = next((line for line in reversed(list(lines)) if line["task"] == name), None)
    if newest is None or newest["key"] != key:
        return False
    return bool(newest.get("nothing")) or (output / f"{name}.jsonl").exists()


def _unread_text(
    model: Served, suite: Suite, seq_len: int, wishes: Wishes, output: Path, header: Mapping[str, Any]
) -> Text | None:
    """Read the text for instruments, before anything is written or measured; None if all were measured before."""
    lines = recorded(output / "samples.jsonl", header)
    if all(_is_measured(_key(name, suite, wishes), name, lines, output) for name in suite.instruments):
        return None
    return read_text(model.folder, model.config.data, seq_len, wishes.data, suite.instrument_length, wishes.rows)


def _instruments(
    model: Served, suite: Suite, wishes: Wishes, text: Text, output: Path, records: Records, bar: Bar
) -> None:
    """Measure the instruments without a record, write their files, and record that these exist.

    Only one replica measures.
    """
    for number, name in enumerate(suite.instruments, 1):
        key = _key(name, suite, wishes)
        if _is_measured(key, name, records.lines.values(), output):
            continue
        with bar(f"{name} ({number} of {len(suite.instruments)})") as moved:
            is_measured = written(name, model.read, model.config, text, model.first, output, moved)
        line = {"key": key, "task": name, "length": text.length, "rows": len(text.tokens_BT), "text": text.described}
        records.add([line if is_measured else {**line, "nothing": True}])


def finished(name: str, suite: Suite, records: Records, output: Path, seq_len: int) -> Evaluated:
    """Write results, pictures and page from everything that was recorded."""
    lines = list(records.lines.values())
    rows = rows_of(lines, records.about) + _verdict(lines, records, output, seq_len)
    newest = {line["task"]: line for line in lines if line["task"] in INSTRUMENTS}
    with_table = [name for name in INSTRUMENTS if name in newest and not newest[name].get("nothing")]
    tables = {name: table_of(name, output, seq_len) for name in with_table}
    without_table = [f"{name}: {NO_LAYER}" for name in newest if name not in with_table]
    left_out = [*suite.left_out, *without_table]
    table_fields = {name: table._asdict() for name, table in tables.items()}
    results = {"rows": rows, "left_out": left_out, "instruments": table_fields}
    write_whole(output / "results.json", json.dumps(results, indent=1) + "\n")
    evaluated = Evaluated(name, output, records.about, rows, lines, left_out, tables=tables)
    if is_there("matplotlib"):
        draw_all(evaluated, seq_len)
    write_whole(output / "index.html", page(name, [evaluated]))
    return evaluated


def _verdict(lines: Iterable[Line], records: Records, output: Path, seq_len: int) -> list[Row]:
    """Return a list with the verdict on length generalization as a row; empty if positions were not measured."""
    measured = [line for line in lines if line["task"] == "positions"]
    if measured:
        position_lines = read_lines(output / "positions.jsonl")
    else:
        position_lines = []
    decision = verdict(position_lines, seq_len)
    if decision is None:
        return []
    place: Row = {"task": "length generalization", "length": len(position_lines), "metric": "holds"}
    value: Row = {"value": float(decision.holds), "standard_error": None, "n": measured[-1]["rows"], "seed": None}
    return [{**place, **value, **decision._asdict(), "tolerance": TOLERANCE, "about": records.about}]


def draw_all(one: Evaluated, seq_len: int) -> None:
    """Draw an evaluation's pictures and register them by title."""
    tasks = by_length_rows(one.rows)
    for task, rows in tasks.items():
        if "by_depth" in rows[0]:
            file = one.folder / f"{re.sub(r'[^a-z0-9_]+', '-', task).strip('-')}_depth.png"
            heat_map(task, rows, seq_len, file)
            one.pictures[f"{task} by depth and length"] = file
    if tasks:
        by_length({one.name: tasks}, [seq_len], one.folder / "by_length.png")
        one.pictures["by length"] = one.folder / "by_length.png"
    for name in one.tables:
        if (file := one.folder / f"{name}.png").exists():
            one.pictures[name] = file


def compared(title: str, evaluations: list[Evaluated], output: Path) -> None:
    """Write results and page for several checkpoints side by side."""
    rows: list[Row] = [{"run": evaluated.name, **row} for evaluated in evaluations for row in evaluated.rows]
    write_whole(output / "results.json", json.dumps({"rows": rows}, indent=1) + "\n")
    pictures: list[tuple[str, bytes]] = []
    if is_there("matplotlib"):
        seq_lens = [evaluated.about["seq_len"] for evaluated in evaluations]
        file = output / "by_length.png"
        if any(by_length_rows(evaluated.rows) for evaluated in evaluations):
            by_length({evaluated.name: by_length_rows(evaluated.rows) for evaluated in evaluations}, seq_lens, file)
            pictures.append(("by length", file.read_bytes()))
        curves = {"positions": partial(position_curves, seq_lens=seq_lens), "entropy": entropy_curves}
        for name, draw_curves in curves.items():
            of_runs = {evaluated.name: read_lines(evaluated.folder / f"{name}.jsonl") for evaluated in evaluations}
            if all(of_runs.values()):
                file = output / f"{name}.png"
                draw_curves(of_runs, output=file)
                pictures.append((CURVES[name], file.read_bytes()))
    write_whole(output / "index.html", page(title, evaluations, pictures))
