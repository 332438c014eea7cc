"""An evaluation by lm-evaluation-harness from start to end: load the tasks, ask them one after another, write results.

    samples.jsonl   a line for each request; a killed evaluation continues after the last one
    results.json    a row for each task and metric, as for suites; `length` is the number of examples in a prompt
    index.html      the same on one page, with answers

A task that can't be asked, usually because its data set is not on this machine, is left out with the reason.
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
from hybridtron.evaluate.answers import SHOWN
from hybridtron.evaluate.harness import VERSION, HarnessModel, asked, known_tasks, loaded
from hybridtron.evaluate.harness_tasks import HARNESS_GROUPS, HarnessTask
from hybridtron.evaluate.page import page
from hybridtron.evaluate.records import Line
from hybridtron.evaluate.results import Evaluated, Row
from hybridtron.evaluate.run import Bar, about, opened
from hybridtron.evaluate.served import Served
from hybridtron.interop.export import longest_row
from hybridtron.interop.tokenizer import CHAT
from hybridtron.problems import Unusable
from hybridtron.tasks.tokens import open_tokens
from hybridtron.train.records import write_whole


@dataclass(frozen=True)
class HarnessWishes:
    """The command line's settings for the harness.

    `names` are tasks and groups. `samples` is the maximum for each task. With `run_code`, code that the model writes
    may be run. With `chat` all tasks are asked in chats; without it, only those that a group asks that way.
    """

    names: Sequence[str]
    include: Path | None = None
    samples: int | None = None
    batch: int = 16
    max_length: int | None = None
    run_code: bool = False
    chat: bool = False


def wanted_tasks(names: Sequence[str], chat: bool = False) -> list[HarnessTask]:
    """List the tasks that these names of tasks and groups stand for, without duplicates.

    A task may be in the list twice: in a chat and as plain text.
    """
    groups = (HARNESS_GROUPS.get(name, (HarnessTask(name),)) for name in names)
    tasks = (replace(task, chat=chat or task.chat) for task in chain.from_iterable(groups))
    return list({(task.name, task.chat): task for task in tasks}.values())


def measured(model: Served, name: str, wishes: HarnessWishes, output: Path, bar: Bar) -> Evaluated:
    """Evaluate a checkpoint with the harness, and write the results. Recorded requests are not measured again.

    Raises Unusable if no task can be asked. All processes call this together; the first one writes.
    """
    tasks = wanted_tasks(wishes.names, wishes.chat)
    manager = known_tasks(tasks, wishes.include)
    checkpoint = Checkpoint.open(model.folder)
    chat = chat_template(checkpoint, [task.name for task in tasks if task.chat])
    task_contents = [(task, loaded(task, manager, wishes.run_code)) for task in tasks]
    left_out = [f"{task.name}: {reason}" for task, reason in task_contents if isinstance(reason, str)]
    if len(left_out) == len(tasks):
        raise Unusable(
            "\n".join([*left_out, "nothing remains; `--harness tiny` needs no data set"]), code="unavailable"
        )
    max_length = wishes.max_length or longest_row(checkpoint)
    tokens = open_tokens(str(model.folder))
    header = about(model, tokens, max_length) | {"lm-eval": VERSION}
    lm = HarnessModel(model, opened(model, output, header), wishes.batch, max_length, chat)
    rows = []
    lines = []
    for task, content in task_contents:
        if isinstance(content, str):
            continue
        lm.cut = lm.without_system = 0
        with bar(task.name) as lm.moved:
            results = asked(lm, content, task.chat, wishes.samples, wishes.run_code)
        rows += [row | {"about": header} for row in rows_of_results(results, task.chat)]
        lines += lines_of_samples(results, task.chat)
        if lm.cut:
            cure = f"longer than --max-length {max_length} and lost their beginning"
            left_out.append(f"{task.name}: {lm.cut} of its prompts and texts were {cure}")
        if lm.without_system:
            left_out.append(f"{task.name}: the system prompts of its chats, as the chat template takes none")
    evaluated = Evaluated(name, output, header, rows, lines, left_out)
    if model.first:
        write_whole(output / "results.json", json.dumps({"rows": rows, "left_out": left_out}, indent=1) + "\n")
        write_whole(output / "index.html", page(name, [evaluated]))
    return evaluated


def chat_template(checkpoint: Checkpoint, needed_by: Sequence[str]) -> ChatTemplate | None:
    """Return the checkpoint's chat template, or None. Raises Unusable if it has none and some tasks need one."""
    if (stored := checkpoint.meta.data.get(CHAT)) is not None:
        return ChatTemplate.of_stored(stored)
    if needed_by:
        fault = f"{checkpoint.folder} has no chat template, and {', '.join(needed_by)} would be asked in chats"
        cure = "data that is prepared with --learn messages brings one, and so does an imported folder"
        raise Unusable(f"{fault}: {cure}; `--harness {needed_by[0]}` without --chat asks in plain text", code="missing")
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
    """Describe how many examples a prompt has, in the place of a length."""
    return f"{results['n-shot'].get(task, 0)}-shot" + (" chat" if chat else "")


def lines_of_samples(results: Mapping[str, Any], chat: bool) -> Iterator[Line]:
    """Yield the fields that the page shows for each answer."""
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            metrics = {name: sample[name] for name in sample["metrics"] if isinstance(sample[name], float | int)}
            if metrics:
                yield {
                    "task": task,
                    "length": _examples(results, task, chat),
                    "metrics": metrics,
                    "asked": str(sample["arguments"][0][0])[-SHOWN:],
                    "wanted": str(sample["target"]),
                    "written": ", ".join(map(str, sample["filtered_resps"]))[:SHOWN],
                }
