"""An evaluation by lm-evaluation-harness ("the harness") from start to end: load the tasks, run them, write results.

    samples.jsonl   a line for each request; a killed evaluation continues after the last line
    results.json    a row for each task and metric; the field `length` is the number of examples, such as `5-shot`
    index.html      the results on one page, with some answers

A task that can't be loaded, usually because its data set is not on this machine, is left out; the results give the
reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.data.prepare.chat import ChatTemplate
from hybridtron.evaluate.answers import MAX_CHARACTERS
from hybridtron.evaluate.evaluation import Bar, open_log, provenance
from hybridtron.evaluate.harness import VERSION, HarnessModel, known_tasks, load_task, run_tasks
from hybridtron.evaluate.harness_tasks import HARNESS_GROUPS, HarnessTask
from hybridtron.evaluate.loaded_model import LoadedModel
from hybridtron.evaluate.page import page
from hybridtron.evaluate.results import Evaluated, Row
from hybridtron.evaluate.sample_log import Line
from hybridtron.interop.export import longest_row
from hybridtron.interop.tokenizer import CHAT
from hybridtron.problems import Unusable
from hybridtron.tasks.tokens import open_tokens
from hybridtron.train.jsonl import write_whole


@dataclass(frozen=True)
class HarnessRequest:
    """The settings of `hybridtron evaluate --harness`.

    names: names of tasks and task groups
    include: folder with additional task files
    samples: maximum number of documents for each task; None for all
    batch: how many requests a batch has
    max_length: maximum number of tokens in a request; None for the maximum that an export's config.json would have
    run_code: allow tasks that run code from the model's answers
    chat: format all tasks' prompts as chats; otherwise only the prompts of tasks whose group sets `chat`
    """

    names: Sequence[str]
    include: Path | None = None
    samples: int | None = None
    batch: int = 16
    max_length: int | None = None
    run_code: bool = False
    chat: bool = False


def wanted_tasks(names: Sequence[str], chat: bool = False) -> list[HarnessTask]:
    """Replace each group's name with the group's tasks, and remove duplicates.

    A task may be in the list twice: once with prompts as chats, and once with prompts as plain text.
    """
    groups = (HARNESS_GROUPS.get(name, (HarnessTask(name),)) for name in names)
    tasks = (replace(task, chat=chat or task.chat) for task in chain.from_iterable(groups))
    return list({(task.name, task.chat): task for task in tasks}.values())


def evaluate_by_harness(model: LoadedModel, name: str, request: HarnessRequest, output: Path, bar: Bar) -> Evaluated:
    """Evaluate a checkpoint with the harness, and write the results. Recorded requests are not run again.

    Raises Unusable if no task can be loaded. All processes call this together; rank 0 writes.
    """
    tasks = wanted_tasks(request.names, request.chat)
    manager = known_tasks(tasks, request.include)
    checkpoint = Checkpoint.open(model.folder)
    chat = chat_template(checkpoint, [task.name for task in tasks if task.chat])
    task_contents = [(task, load_task(task, manager, request.run_code)) for task in tasks]
    left_out = [f"{task.name}: {reason}" for task, reason in task_contents if isinstance(reason, str)]
    if len(left_out) == len(tasks):
        raise Unusable(
            "\n".join([*left_out, "no task can be run; `--harness tiny` runs tasks without a data set"]),
            code="unavailable",
        )
    max_length = request.max_length or longest_row(checkpoint)
    tokens = open_tokens(str(model.folder))
    header = provenance(model, tokens, max_length) | {"lm-eval": VERSION}
    lm = HarnessModel(model, open_log(model, output, header), request.batch, max_length, chat)
    rows = []
    lines = []
    for task, content in task_contents:
        if isinstance(content, str):
            continue
        lm.cut = lm.without_system = 0
        with bar(task.name) as lm.moved:
            results = run_tasks(lm, content, task.chat, request.samples, request.run_code)
        rows += [row | {"about": header} for row in rows_of_results(results, task.chat)]
        lines += lines_of_samples(results, task.chat)
        if lm.cut:
            reason = f"longer than --max-length {max_length}"
            left_out.append(f"{task.name}: the beginnings of {lm.cut} prompts and texts, which were {reason}")
        if lm.without_system:
            left_out.append(f"{task.name}: the system prompts of its chats, since the chat template accepts none")
    evaluated = Evaluated(name, output, header, rows, lines, left_out)
    if model.first:
        write_whole(output / "results.json", json.dumps({"rows": rows, "left_out": left_out}, indent=1) + "\n")
        write_whole(output / "index.html", page(name, [evaluated]))
    return evaluated


def chat_template(checkpoint: Checkpoint, needed_by: Sequence[str]) -> ChatTemplate | None:
    """Return the checkpoint's chat template, or None if the checkpoint has no template.

    Raises Unusable if the checkpoint has no template, but tasks need a template (`needed_by`).
    """
    if (stored := checkpoint.meta.data.get(CHAT)) is not None:
        return ChatTemplate.of_stored(stored)
    if needed_by:
        fault = f"{checkpoint.folder} has no chat template, which these tasks need for chats: {', '.join(needed_by)}"
        cure = "train on data prepared with `data prepare --learn messages`, or import a model with a chat template"
        raise Unusable(f"{fault}; {cure}; `--harness {needed_by[0]}` without --chat uses plain text", code="missing")
    return None


def rows_of_results(results: Mapping[str, Any], chat: bool) -> Iterator[Row]:
    """Yield a row for each metric that the harness reports for a task or group."""
    subtasks = results.get("group_subtasks", {})
    for task, task_results in {**results["results"], **results.get("groups", {})}.items():
        members = [member for member in subtasks.get(task, [task]) if member in results["n-samples"]]
        count = sum(results["n-samples"][member]["effective"] for member in members)
        for key, value in task_results.items():
            metric, _, filter_name = key.partition(",")
            if filter_name and not metric.endswith("_stderr"):
                error = task_results.get(f"{metric}_stderr,{filter_name}")
                yield {
                    "task": task,
                    "length": _examples(results, task, chat),
                    "metric": metric if filter_name == "none" else f"{metric} ({filter_name})",
                    "value": float(value),
                    "standard_error": float(error) if isinstance(error, float | int) else None,
                    "n": count,
                }


def _examples(results: Mapping[str, Any], task: str, chat: bool) -> str:
    """Describe how many examples a prompt has, such as `5-shot` or `5-shot chat`."""
    return f"{results['n-shot'].get(task, 0)}-shot" + (" chat" if chat else "")


def lines_of_samples(results: Mapping[str, Any], chat: bool) -> Iterator[Line]:
    """Yield the fields that `index.html` shows for each answer."""
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            metrics = {name: sample[name] for name in sample["metrics"] if isinstance(sample[name], float | int)}
            if metrics:
                yield {
                    "task": task,
                    "length": _examples(results, task, chat),
                    "metrics": metrics,
                    "asked": str(sample["arguments"][0][0])[-MAX_CHARACTERS:],
                    "wanted": str(sample["target"]),
                    "written": ", ".join(map(str, sample["filtered_resps"]))[:MAX_CHARACTERS],
                }
