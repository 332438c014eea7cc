"""Suites: the tasks, perplexities and instruments of an evaluation, by name or from a user's YAML file.

    samples: 100                  # for each task and length
    seed: 0
    tasks:
      - {task: passkey, lengths: [1x, 4x, 4096], samples: 55, options: {digits: 3}}
      - {task: ruler_se, lengths: [4096], options: {essay: "files:essays"}}  # only for tasks with this option
    perplexity:
      - {lengths: [1x, 2x, 4x], rows: 16}
      - {context: 1x, stride: 64, score: new, windows: 100}
    instruments: [positions, remembrance, states, entropy]
    instrument_length: 16x

Lengths are in tokens; `4x` is four times the training length. An instrument is a measurement on held-out text, such as
the loss by position.

A suite is checked before the model reads anything, including whether the tasks' samples fit into their length. If a
task can't be asked, a user's suite raises an error. A suite of this package leaves the task out and reports the reason,
such as a missing data set, or lengths that do not fit a small model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridtron.config.yaml_file import read_keys, require_known
from hybridtron.evaluate.instruments import INSTRUMENTS
from hybridtron.limits import shortened
from hybridtron.problems import Unusable, did_you_mean
from hybridtron.tasks.base import MAX_TOKENS, Task, TaskError, TextTokens
from hybridtron.tasks.options import all_named, named, options_of

TRIED_TOKENS = 2**19  # tokens of trial samples for each task and length, to check that samples fit
DOUBLED = ["1x", "2x", "4x"]
PASSKEY = {"task": "passkey", "lengths": ["1x", "2x", "4x", "8x", "16x", "32x", "64x"], "samples": 55}
SUITES: dict[str, dict[str, Any]] = {
    "samba": {"tasks": [PASSKEY], "perplexity": [{"lengths": DOUBLED}], "instruments": ["positions", "entropy"]},
    "span": {"tasks": [{"task": "ruler_se", "lengths": DOUBLED}], "perplexity": [{"lengths": DOUBLED}]},
    "length": {
        "tasks": [PASSKEY, {"task": "babilong", "lengths": [*DOUBLED, "8x", "16x"]}],
        "perplexity": [{"lengths": DOUBLED}, {"context": "1x", "stride": "1/4x", "score": "new"}],
        "instruments": list(INSTRUMENTS),
    },
    "hax": {"tasks": [{"task": name, "lengths": ["1x"]} for name in ("ruler_hax", "qa_synth_1")]},
}
EVERY = ("needle", "ruler", "qa_synth_1", "qa_synth_2", "babilong")
SUITES["all"] = {
    "tasks": [PASSKEY, *({"task": name, "lengths": DOUBLED} for name in EVERY)],
    "perplexity": SUITES["length"]["perplexity"],
    "instruments": list(INSTRUMENTS),
}
KEYS = {
    "": ("samples", "seed", "tasks", "perplexity", "instruments", "instrument_length"),
    "tasks": ("task", "lengths", "samples", "options"),
    "perplexity": ("lengths", "rows", "context", "stride", "score", "windows"),
}
SCORES = ("new", "all")


@dataclass(frozen=True)
class Cell:
    """A task at a length. Its samples have the indices 0, 1, ... and a common seed."""

    task: Task
    length: int
    samples: int
    seed: int

    @property
    def label(self) -> str:
        """The task's name, followed by the options whose values differ from the registered task's values."""
        defaults = options_of(named(self.task.name))
        changed = [f"{key}={value}" for key, value in options_of(self.task).items() if value != defaults[key]]
        return self.task.name + (f"[{','.join(changed)}]" if changed else "")

    def key(self, index: int) -> str:
        """Return the key of a sample's line in samples.jsonl."""
        return f"{self.label}/{self.length}/{self.seed}/{index}"


@dataclass(frozen=True)
class PerplexityOf:
    """A perplexity to measure, on `count` separate rows or on `count` sliding windows of one text.

    length: tokens in each row or window
    stride: tokens between the beginnings of consecutive windows; 0 for rows
    score: `all` scores all tokens; `new` scores all tokens of the first window, but in each later window only the
        tokens that were not in the window before

    Each row or window starts from zero states.
    """

    length: int
    count: int
    stride: int = 0
    score: str = "all"

    @property
    def label(self) -> str:
        if self.stride:
            return f"perplexity[stride={self.stride},score={self.score}]"
        return "perplexity"

    def key(self, index: int) -> str:
        """Return the key of a row's or window's line in samples.jsonl."""
        return f"{self.label}/{self.length}/{index}"


@dataclass
class Suite:
    """Everything to measure in an evaluation. `left_out` has the tasks that can't be asked, with reasons."""

    cells: list[Cell] = field(default_factory=list)
    perplexities: list[PerplexityOf] = field(default_factory=list)
    instruments: list[str] = field(default_factory=list)
    instrument_length: int = 0
    left_out: list[str] = field(default_factory=list)


def named_or_file(name: str) -> dict[str, Any]:
    """Return a suite's definition, by its name or from a file. Raises Unusable for an unknown name or a faulty file."""
    if name in SUITES:
        return SUITES[name]
    if not Path(name).exists():
        raise Unusable(
            f"{name!r} is neither a file nor a suite{did_you_mean(name, SUITES)}; suites are {', '.join(SUITES)}",
            code="unknown-name",
        )
    return read_keys(Path(name), KEYS[""])


def suite_of(
    asked: Mapping[str, Any], seq_len: int, lengths: Sequence[str] | None = None, samples: int | None = None
) -> Suite:
    """Build a suite from its definition for a training length.

    `lengths` and `samples` override the values in the definition. Raises Unusable for a faulty definition.
    """
    unknown("", asked)
    default_samples = samples or number(asked, "samples", 100)
    suite = Suite(instruments=_entries(asked, "instruments"))
    for name in suite.instruments:
        if name not in INSTRUMENTS:
            raise Unusable(
                f"instruments: there is no {name!r}{did_you_mean(name, INSTRUMENTS)}; use {', '.join(INSTRUMENTS)}",
                code="unknown-name",
            )
    suite.instrument_length = tokens_of(asked.get("instrument_length", "16x"), seq_len)
    for entry in _entries(asked, "tasks"):
        unknown("tasks", entry)
        options = entry.get("options", {})
        if not isinstance(options, Mapping):
            raise Unusable(
                f"tasks: options is {options!r}, must be values by name, such as {{digits: 3}}", code="wrong-type"
            )
        settings = [f"{key}={value}" for key, value in options.items()]
        tasks = all_named([str(entry.get("task", ""))], settings)
        num_samples = samples or number(entry, "samples", default_samples)
        for task in tasks:
            for length in lengths or _lengths(entry):
                suite.cells.append(
                    Cell(task, tokens_of(length, seq_len), num_samples, number(asked, "seed", 0, least=0))
                )
    for entry in _entries(asked, "perplexity"):
        unknown("perplexity", entry)
        suite.perplexities += _perplexities(entry, seq_len, lengths)
    if not (suite.cells or suite.perplexities or suite.instruments):
        raise Unusable("the suite is empty: list tasks, perplexity or instruments", code="missing")
    return suite


def _perplexities(entry: Mapping[str, Any], seq_len: int, lengths: Sequence[str] | None) -> Iterable[PerplexityOf]:
    """Parse an entry under `perplexity`: sliding windows if the entry has a `context`, else rows with given lengths."""
    if "context" not in entry:
        rows = number(entry, "rows", 16)
        return [PerplexityOf(tokens_of(length, seq_len), rows) for length in lengths or _lengths(entry)]
    context = tokens_of(entry["context"], seq_len)
    score = entry.get("score", "new")
    stride = tokens_of(entry.get("stride", context), seq_len)
    if score not in SCORES:
        raise Unusable(f"perplexity.score is {score!r}, must be new or all", code="unknown-name")
    if stride > context:
        raise Unusable(
            f"perplexity.stride is {stride}, must be at most context={context}, so that no tokens are skipped",
            code="out-of-range",
        )
    if context > seq_len:
        cure = f"use `lengths` for longer texts, or --seq-len {context} if the model was trained at this length"
        raise Unusable(
            f"perplexity.context is {context}, must be at most the training length, {seq_len}: {cure}",
            code="out-of-range",
        )
    return [PerplexityOf(context, number(entry, "windows", 64), stride, score)]


def unknown(section: str, entry: Any) -> None:
    """Raise Unusable if an entry is not a mapping, or has unknown keys."""
    if not isinstance(entry, Mapping):
        raise Unusable(
            f"{section}: {entry!r} must be a mapping with keys out of {', '.join(KEYS[section])}", code="wrong-type"
        )
    require_known(section or "the file", entry, KEYS[section])


def _entries(asked: Mapping[str, Any], key: str) -> list[Any]:
    """Return a copy of a list in the definition, or an empty list if the key is absent.

    Raises Unusable if the value is not a list.
    """
    entries = asked.get(key, [])
    if not isinstance(entries, list):
        raise Unusable(f"{key} is {entries!r}, must be a list", code="wrong-type")
    return list(entries)


def number(entry: Mapping[str, Any], key: str, usual: int, least: int = 1) -> int:
    """Return a whole number from an entry, or `usual` if the key is absent.

    Raises Unusable if the value is not a whole number or is below `least`.
    """
    value = entry.get(key, usual)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Unusable(f"{key} is {value!r}, must be a whole number of at least {least}", code="out-of-range")
    return value


def _lengths(entry: Mapping[str, Any]) -> list[Any]:
    """Return the list of an entry's lengths. Raises Unusable if it is missing or empty."""
    lengths = entry.get("lengths")
    if not isinstance(lengths, list) or not lengths:
        raise Unusable(
            f"{entry.get('task', 'perplexity')}: lengths is {lengths!r}, must be a list such as [1x, 4096]",
            code="wrong-type",
        )
    return lengths


def tokens_of(text: str | int, seq_len: int) -> int:
    """Convert a length to a number of tokens.

    `4096` is in tokens; `4x` and `1/4x` are in training lengths. Raises Unusable if the text is malformed or the length
    is too large.
    """
    match = re.fullmatch(r"(?:(\d{1,9})/)?0*([1-9]\d{0,19})(x?)", str(text), re.ASCII)
    if match is None or (match[1] and not match[3]):
        raise Unusable(
            f"a length is {shortened(str(text))}, must be tokens such as 8192, or training lengths such as 16x",
            code="malformed",
        )
    if match[1]:
        return max(1, int(match[1]) * seq_len // int(match[2]))
    tokens = int(match[2]) * (seq_len if match[3] else 1)
    if tokens > MAX_TOKENS:
        raise Unusable(
            f"a length is {shortened(str(text))}, must be at most {MAX_TOKENS:,} tokens", code="out-of-range"
        )
    return tokens


def fitting(suite: Suite, tokenizer: TextTokens, vocab_size: int, lenient: bool) -> Suite:
    """Remove the cells (tasks at a length) that can't be asked. `left_out` of the returned suite has the reasons.

    Raises Unusable if a cell can't be asked and `lenient` is False, and also if nothing remains.
    """
    kept_cells = []
    left_out = []
    for cell in suite.cells:
        if (reason := misfit(cell, tokenizer, vocab_size)) is None:
            kept_cells.append(cell)
        else:
            left_out.append(f"{cell.label} at {cell.length}: {reason}")
    if left_out and (not lenient or not (kept_cells or suite.perplexities or suite.instruments)):
        raise Unusable(
            "\n".join([*left_out, "give other lengths with --lengths, or other tasks in a suite file"]),
            code="does-not-fit",
        )
    return Suite(kept_cells, suite.perplexities, suite.instruments, suite.instrument_length, left_out)


def misfit(cell: Cell, tokenizer: TextTokens, vocab_size: int) -> str | None:
    """Make trial samples; return the reason why the cell can't be asked, or None."""
    if (size := getattr(cell.task, "num_tokens", 0)) > vocab_size:
        return f"the task needs {size} token ids, but the model's vocabulary has only {vocab_size}"
    try:
        for index in range(min(cell.samples, 1 + TRIED_TOKENS // cell.length)):
            cell.task.sample(cell.seed, index, tokenizer, cell.length)
    except TaskError as error:
        return str(error)
    return None
