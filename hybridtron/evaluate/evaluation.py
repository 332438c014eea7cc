"""The evaluation of one checkpoint from start to end: check the suite, measure, write results.

A suite lists tasks, perplexities and instruments. An instrument is a measurement on held-out text, such as the loss by
position (`instruments.py`). These files are written:

    samples.jsonl       a line for each task sample, row of text, and instrument
    results.json        a row for each task, length and metric, with the measurement's conditions
    *.jsonl             each instrument's measurements
    *.png               charts for instruments, and for task scores by length and by depth
    index.html          all results on one page

If an evaluation is killed, the next evaluation skips everything that has a line in `samples.jsonl`. A sample's depth is
the position of the sentence that the model must find: 0 at the start of the sample's text, 1 at its end.

All processes that torchrun started run this code. Only rank 0 writes.
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
from hybridtron.evaluate.instruments import INSTRUMENTS, TOLERANCE, run_instrument, table_of, verdict
from hybridtron.evaluate.kernels import kernels_of
from hybridtron.evaluate.length import attention_at_eval
from hybridtron.evaluate.loaded_model import LoadedModel
from hybridtron.evaluate.page import page
from hybridtron.evaluate.pictures import by_length, entropy_curves, heat_map, position_curves
from hybridtron.evaluate.results import Evaluated, Row, by_length_rows, rows_of
from hybridtron.evaluate.sample_log import Line, SampleLog, read_recorded
from hybridtron.evaluate.suites import Suite, fitting, suite_of
from hybridtron.inference.compiled_decode import unsupported_reason
from hybridtron.parallel.groups import barrier
from hybridtron.problems import Unusable
from hybridtron.requirements import is_there
from hybridtron.storage.digest import digest_of
from hybridtron.tasks.base import TextTokens
from hybridtron.tasks.tokens import open_tokens
from hybridtron.train.jsonl import read_lines, write_whole

NO_LAYER = "nothing to measure, because the model has no layer that this instrument measures"
CURVES = {"positions": "perplexity by position", "entropy": "entropy by layer"}
Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class EvalRequest:
    """The settings of `hybridtron evaluate`.

    asked: the suite's definition
    named: True for a suite from the package. Its parts that do not fit the model are left out. In a user's suite, such
        parts raise Unusable
    lengths: lengths of the tasks' samples; None for the lengths in the definition
    samples: how many samples to take for each task and length; None for the number in the definition
    batch: how many samples or rows are read together
    rows: how many rows of text to read for instruments
    data: prepared folder to read held-out text from; None for the data that the run was trained on
    seq_len: training length; None for the checkpoint's training length
    """

    asked: Mapping[str, Any]
    named: bool
    lengths: list[str] | None = None
    samples: int | None = None
    batch: int = 16
    rows: int = 8
    data: str | None = None
    seq_len: int | None = None


def evaluate(model: LoadedModel, name: str, request: EvalRequest, output: Path, bar: Bar) -> Evaluated:
    """Evaluate a checkpoint with a suite, and write the results. Recorded samples are not measured again.

    All processes call this together. Rank 0 returns the results; all other ranks return empty results.
    """
    data, seq_len = as_trained(model.folder, model.plan, model.step, request.seq_len)
    config = replace(model.config, data=data)
    model = replace(model, config=config)
    tokens = open_tokens(str(model.folder))
    if (largest := model.tokenizer.get_vocab_size()) > (size := config.model.vocab_size):
        fault = f"tokenizer.json has {largest} tokens, but model.vocab_size is only {size}"
        raise Unusable(
            f"{model.folder}: {fault}; restore the tokenizer that the model was trained with", code="mismatch"
        )
    suite = suite_of(request.asked, seq_len, request.lengths, request.samples)
    suite = fitting(suite, tokens, size, lenient=request.named)
    read_rows = partial(perplexity.rows_of, model.folder, config.data, seq_len=seq_len, path=request.data)
    texts = [(wanted, *read_rows(wanted)) for wanted in suite.perplexities]
    header = provenance(model, tokens, seq_len)
    if request.data is not None:
        header["data"] = digest_of_data(config.data, request.data)
    text = _unread_text(model, suite, seq_len, request, output, header)
    records = open_log(model, output, header)
    with bar("tasks") as moved:
        ask(model, suite.cells, tokens, records, request.batch, moved)
    for wanted, rows_BT, described in texts:
        with bar(f"{wanted.label} {wanted.length}") as moved:
            perplexity.measure(model, wanted, rows_BT, described, records, request.batch, moved)
    if model.replica == 0 and text is not None:
        _instruments(model, suite, request, text, output, records, bar)
    if model.first:
        return write_results(name, suite, records, output, seq_len)
    return Evaluated(name, output, {}, [], [])


def open_log(model: LoadedModel, output: Path, header: Mapping[str, Any]) -> SampleLog:
    """Open `samples.jsonl`, and load the lines that an earlier evaluation wrote.

    Rank 0 removes an incomplete last line. All other ranks read the file after that.
    """
    file = output / "samples.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    if model.alone:
        return SampleLog(file, header)
    first_records = SampleLog(file, header) if model.first else None
    barrier()
    return first_records or SampleLog(file, header, writes=False)


def provenance(model: LoadedModel, tokens: TextTokens, seq_len: int) -> dict[str, Any]:
    """Return the measurement's conditions: checkpoint, tokenizer, dtype, kernels, attention and so on."""
    device = compute_device().type
    conditions: dict[str, Any] = {
        "step": model.step,
        "seq_len": seq_len,
        "attention": attention_at_eval(model.arch),
        "dtype": str(model.config.precision.name),
        "device": device,
        "decoding": "model" if model.read.model is None or unsupported_reason(model.read.model) else "compiled",
        "kernels": kernels_of(model.arch, model.read.dtype, seq_len, device),
        "hybridtron": __version__,
        "tokenizer": tokens.digest,
        "checkpoint": digest_of((model.folder / "manifest.json").read_bytes()),
    }
    if model.averaged:
        conditions["weights"] = "moving average"
    layers = model.config.model.layers
    if extended := {letter: options["self_extend"] for letter, options in layers.items() if "self_extend" in options}:
        conditions["self_extend"] = extended
    return conditions


def _key(name: str, suite: Suite, request: EvalRequest) -> str:
    """Return the key for an instrument's line: its name, the text's length, and the row count."""
    return f"{name}/{suite.instrument_length}/{request.rows}"


def _is_measured(key: str, name: str, lines: Iterable[Line], output: Path) -> bool:
    """Return True if an instrument's newest line has this key, and the instrument's file of measurements exists.

    A line with the field `nothing` needs no file: the model had no layer to measure.
    """
    newest = next((line for line in reversed(list(lines)) if line["task"] == name), None)
    if newest is None or newest["key"] != key:
        return False
    return bool(newest.get("nothing")) or (output / f"{name}.jsonl").exists()


def _unread_text(
    model: LoadedModel, suite: Suite, seq_len: int, request: EvalRequest, output: Path, header: Mapping[str, Any]
) -> Text | None:
    """Return the text for instruments, or None if earlier evaluations have measured all instruments.

    The text is read before anything is written or measured, so that missing data is reported at once.
    """
    lines = read_recorded(output / "samples.jsonl", header)
    if all(_is_measured(_key(name, suite, request), name, lines, output) for name in suite.instruments):
        return None
    return read_text(model.folder, model.config.data, seq_len, request.data, suite.instrument_length, request.rows)


def _instruments(
    model: LoadedModel, suite: Suite, request: EvalRequest, text: Text, output: Path, records: SampleLog, bar: Bar
) -> None:
    """Measure the instruments that have no line yet; write each instrument's file, and then its line.

    All ranks of the first model replica call this together.
    """
    for number, name in enumerate(suite.instruments, 1):
        key = _key(name, suite, request)
        if _is_measured(key, name, records.lines.values(), output):
            continue
        with bar(f"{name} ({number} of {len(suite.instruments)})") as moved:
            is_measured = run_instrument(name, model.read, model.arch, text, model.first, output, moved)
        line = {"key": key, "task": name, "length": text.length, "rows": len(text.tokens_BT), "text": text.described}
        records.add([line if is_measured else {**line, "nothing": True}])


def write_results(name: str, suite: Suite, records: SampleLog, output: Path, seq_len: int) -> Evaluated:
    """Write `results.json`, pictures and the page from all lines of `samples.jsonl`."""
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


def _verdict(lines: Iterable[Line], records: SampleLog, output: Path, seq_len: int) -> list[Row]:
    """Return a list with one row, the verdict on whether the model generalizes beyond the training length.

    The list is empty if no position beyond the training length was measured.
    """
    measured = [line for line in lines if line["task"] == "positions"]
    if measured:
        position_lines = read_lines(output / "positions.jsonl")
    else:
        position_lines = []
    decision = verdict(position_lines, seq_len)
    if decision is None:
        return []
    name: Row = {"task": "length generalization", "length": len(position_lines), "metric": "holds"}
    value: Row = {"value": float(decision.holds), "standard_error": None, "n": measured[-1]["rows"], "seed": None}
    return [{**name, **value, **decision._asdict(), "tolerance": TOLERANCE, "about": records.about}]


def draw_all(evaluated: Evaluated, seq_len: int) -> None:
    """Draw the tasks' pictures. Add them and the instruments' pictures to `evaluated.pictures`, by title."""
    tasks = by_length_rows(evaluated.rows)
    for task, rows in tasks.items():
        if "by_depth" in rows[0]:
            file = evaluated.folder / f"{re.sub(r'[^a-z0-9_]+', '-', task).strip('-')}_depth.png"
            heat_map(task, rows, seq_len, file)
            evaluated.pictures[f"{task} by depth and length"] = file
    if tasks:
        by_length({evaluated.name: tasks}, [seq_len], evaluated.folder / "by_length.png")
        evaluated.pictures["by length"] = evaluated.folder / "by_length.png"
    for name in evaluated.tables:
        if (file := evaluated.folder / f"{name}.png").exists():
            evaluated.pictures[name] = file


def write_comparison(title: str, evaluations: list[Evaluated], output: Path) -> None:
    """Write `results.json` and a page that compare several checkpoints."""
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
