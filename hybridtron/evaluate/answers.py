"""Answers to task samples: asking a model, and scoring.

A text task's answer is generated greedily and scored by the task's metrics. Only the continuation is scored. It has as
many tokens as the sample specifies, unless the text ends before; there are no stop strings and no BOS. Tasks on token
ids are scored teacher-forced: the likeliest token at each scored position is compared with the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridtron.device import compute_device
from hybridtron.evaluate.length import fitting_chunk, likeliest_tokens
from hybridtron.evaluate.records import Line, Lines
from hybridtron.evaluate.served import Served
from hybridtron.evaluate.suites import Cell
from hybridtron.model.generate import Prompts, continued
from hybridtron.model.text import TextOfRow, write
from hybridtron.parallel.plain_values import all_gather_values
from hybridtron.tasks.base import Sample, TextTokens, TokenTask

SHOWN = 240  # characters stored from the end of a prompt


def ask(
    model: Served,
    cells: Sequence[Cell],
    tokens: TextTokens,
    records: Lines,
    batch: int,
    moved: Callable[[int, int], object],
) -> None:
    """Ask all samples that are not recorded yet, and record the answers. Model replicas take batches in turn.

    `moved` is called with the tokens asked so far and in total. All processes call this together.
    """
    missing = {cell: [i for i in range(cell.samples) if cell.key(i) not in records] for cell in cells}
    total = sum(cell.length * len(indices) for cell, indices in missing.items())
    done = 0
    for cell, indices in missing.items():
        for first in range(0, len(indices), batch * model.replicas):
            turn_indices = indices[first : first + batch * model.replicas]
            own_indices = turn_indices[model.replica * batch :][:batch]
            records.add(everyone(model, answered(model, cell, own_indices, tokens) if own_indices else []))
            done += cell.length * len(turn_indices)
            moved(done, total)


def everyone(model: Served, own: list[Line]) -> list[Line]:
    """Gather the lines from all replicas, sorted by index.

    All ranks within a replica have the same lines, which are kept once.
    """
    if model.alone:
        return own
    lines = {line["key"]: line for lines in all_gather_values(own) for line in lines}
    return sorted(lines.values(), key=lambda line: line["index"])


def answered(model: Served, cell: Cell, indices: Sequence[int], tokens: TextTokens) -> list[Line]:
    """Ask one batch and return its lines."""
    samples = [cell.task.sample(cell.seed, index, tokens, cell.length) for index in indices]
    if isinstance(cell.task, TokenTask):
        return forced(model, cell, cell.task, samples)
    return [line_of(cell, *pair) for pair in zip(samples, generated(model, samples, tokens), strict=True)]


def generated(model: Served, samples: Sequence[Sample], tokens: TextTokens) -> list[TextOfRow]:
    """Generate the model's continuation of each prompt."""
    prompts = [list(sample.prompt_tokens) for sample in samples]
    texts = [
        TextOfRow(tokens.decode, sample.generate, prompt, ends=[model.end])
        for sample, prompt in zip(samples, prompts, strict=True)
    ]
    steps = continued(model.read, Prompts.of(prompts, compute_device()), rows=[sample.index for sample in samples])
    write(texts, steps, lambda row, new: None)
    return texts


def line_of(cell: Cell, sample: Sample, text: TextOfRow) -> Line:
    """Score a generated answer and return its line for the records."""
    metrics = cell.task.score(sample, text.text)
    line = _line(cell, sample, metrics)
    return line | {"asked": sample.prompt[-SHOWN:], "wanted": sample.answer, "written": text.text, "ended": text.ended}


def forced(model: Served, cell: Cell, task: TokenTask, samples: Sequence[Sample]) -> list[Line]:
    """Score samples teacher-forced: predict each position given all right tokens before it.

    Samples with equal length are read together.
    """
    lines_by_index: dict[int, Line] = {}
    for length in dict.fromkeys(len(sample.tokens) for sample in samples):
        samples_of_length = [sample for sample in samples if len(sample.tokens) == length]
        chunk = fitting_chunk(model.config.model, len(samples_of_length), model.read.context.size)
        predicted_BL = likeliest_tokens(model.read, torch.tensor([row.tokens for row in samples_of_length]), chunk)
        for sample, predicted in zip(samples_of_length, predicted_BL.tolist(), strict=True):
            lines_by_index[sample.index] = forced_line(cell, task, sample, predicted)
    return [lines_by_index[sample.index] for sample in samples]


def forced_line(cell: Cell, task: TokenTask, sample: Sample, predicted: list[int]) -> Line:
    """Score teacher-forced predictions and return their line for the records."""
    line = _line(cell, sample, task.score_tokens(sample, predicted))
    scored_places = [place for place, target in enumerate(sample.targets()) if task.is_scored(target)]
    wanted = " ".join(str(sample.targets()[place]) for place in scored_places)
    written = " ".join(str(predicted[place]) for place in scored_places)
    return line | {"asked": sample.prompt[-SHOWN:], "wanted": wanted, "written": written, "ended": "forced"}


def _line(cell: Cell, sample: Sample, metrics: dict[str, float]) -> Line:
    """Return a line's fields that do not depend on how it was scored."""
    fields: dict[str, Any] = {"key": cell.key(sample.index), "task": cell.label, "length": cell.length}
    fields |= {"seed": cell.seed, "index": sample.index, "prompt_tokens": len(sample.prompt_tokens), "metrics": metrics}
    return fields | ({"depth": sample.meta["depth"]} if "depth" in sample.meta else {})
