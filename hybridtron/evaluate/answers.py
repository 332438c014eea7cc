"""Asks a model for answers to task samples, and scores the answers.

- Text tasks: the prompt is continued greedily, up to the end-of-text token or the number of tokens that the sample
  allows. The task's metrics score only the continuation. There are no stop strings and no BOS.
- Tasks on token ids are scored teacher-forced: the model reads the sample with all right tokens, and at each scored
  position the model's likeliest next token is compared with the right token.

A cell has the samples for one task, length and seed. The answer to each sample becomes a line (a dict).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridtron.device import compute_device
from hybridtron.evaluate.length import fitting_chunk, likeliest_tokens
from hybridtron.evaluate.loaded_model import LoadedModel
from hybridtron.evaluate.sample_log import Line, Lines
from hybridtron.evaluate.suites import Cell
from hybridtron.inference.detokenize import Detokenizer, stream_texts
from hybridtron.inference.generate import Prompts, continue_prompts
from hybridtron.parallel.plain_values import all_gather_values
from hybridtron.tasks.base import Sample, TextTokens, TokenTask

MAX_CHARACTERS = 240  # characters stored from the end of a prompt


def ask(
    model: LoadedModel,
    cells: Sequence[Cell],
    tokens: TextTokens,
    records: Lines,
    batch: int,
    moved: Callable[[int, int], object],
) -> None:
    """Ask the model all samples that have no line in `records`, and add lines with the answers.

    A batch has `batch` samples; in each turn, every model replica answers one batch. After each turn `moved` is called
    for a progress bar, with (tokens in the samples answered so far, tokens in all samples to answer). All processes
    call this function together.
    """
    missing = {cell: [i for i in range(cell.samples) if cell.key(i) not in records] for cell in cells}
    total = sum(cell.length * len(indices) for cell, indices in missing.items())
    done = 0
    for cell, indices in missing.items():
        for first in range(0, len(indices), batch * model.replicas):
            turn_indices = indices[first : first + batch * model.replicas]
            own_indices = turn_indices[model.replica * batch :][:batch]
            records.add(everyone(model, answer_batch(model, cell, own_indices, tokens) if own_indices else []))
            done += cell.length * len(turn_indices)
            moved(done, total)


def everyone(model: LoadedModel, own_lines: list[Line]) -> list[Line]:
    """Gather the lines from all model replicas, sorted by sample index.

    All ranks of a replica pass the same lines; duplicates are removed.
    """
    if model.alone:
        return own_lines
    lines = {line["key"]: line for lines in all_gather_values(own_lines) for line in lines}
    return sorted(lines.values(), key=lambda line: line["index"])


def answer_batch(model: LoadedModel, cell: Cell, indices: Sequence[int], tokens: TextTokens) -> list[Line]:
    """Ask one batch of a cell's samples, and return a line for each."""
    samples = [cell.task.sample(cell.seed, index, tokens, cell.length) for index in indices]
    if isinstance(cell.task, TokenTask):
        return score_forced(model, cell, cell.task, samples)
    return [line_of(cell, *pair) for pair in zip(samples, generate_texts(model, samples, tokens), strict=True)]


def generate_texts(model: LoadedModel, samples: Sequence[Sample], tokens: TextTokens) -> list[Detokenizer]:
    """Generate the model's continuation for each prompt."""
    prompts = [list(sample.prompt_tokens) for sample in samples]
    texts = [
        Detokenizer(tokens.decode, sample.generate, prompt, ends=[model.end])
        for sample, prompt in zip(samples, prompts, strict=True)
    ]
    steps = continue_prompts(
        model.read, Prompts.of(prompts, compute_device()), rows=[sample.index for sample in samples]
    )
    stream_texts(texts, steps, lambda row, new: None)
    return texts


def line_of(cell: Cell, sample: Sample, text: Detokenizer) -> Line:
    """Score a generated answer and return its line."""
    metrics = cell.task.score(sample, text.text)
    line = _line(cell, sample, metrics)
    return line | {
        "asked": sample.prompt[-MAX_CHARACTERS:],
        "wanted": sample.answer,
        "written": text.text,
        "ended": text.ended,
    }


def score_forced(model: LoadedModel, cell: Cell, task: TokenTask, samples: Sequence[Sample]) -> list[Line]:
    """Score samples teacher-forced: predict each position given all right tokens before it.

    Samples of equal length are read as one batch.
    """
    lines_by_index: dict[int, Line] = {}
    for length in dict.fromkeys(len(sample.tokens) for sample in samples):
        samples_of_length = [sample for sample in samples if len(sample.tokens) == length]
        chunk = fitting_chunk(model.arch, len(samples_of_length), model.read.context.size)
        predicted_BL = likeliest_tokens(model.read, torch.tensor([row.tokens for row in samples_of_length]), chunk)
        for sample, predicted in zip(samples_of_length, predicted_BL.tolist(), strict=True):
            lines_by_index[sample.index] = forced_line(cell, task, sample, predicted)
    return [lines_by_index[sample.index] for sample in samples]


def forced_line(cell: Cell, task: TokenTask, sample: Sample, predicted: list[int]) -> Line:
    """Score a sample's predicted tokens and return its line."""
    line = _line(cell, sample, task.score_tokens(sample, predicted))
    scored_positions = [position for position, target in enumerate(sample.targets()) if task.is_scored(target)]
    wanted = " ".join(str(sample.targets()[position]) for position in scored_positions)
    written = " ".join(str(predicted[position]) for position in scored_positions)
    return line | {"asked": sample.prompt[-MAX_CHARACTERS:], "wanted": wanted, "written": written, "ended": "forced"}


def _line(cell: Cell, sample: Sample, metrics: dict[str, float]) -> Line:
    """Return the fields that every line has. If the sample has a needle, add the needle's depth."""
    fields: dict[str, Any] = {"key": cell.key(sample.index), "task": cell.label, "length": cell.length}
    fields |= {"seed": cell.seed, "index": sample.index, "prompt_tokens": len(sample.prompt_tokens), "metrics": metrics}
    return fields | ({"depth": sample.meta["depth"]} if "depth" in sample.meta else {})
