"""Looks up tasks by name and sets their options: `named("passkey", ["digits=3"])`.

A group's name stands for several tasks. Each of them gets the options that it has: `essay=...` for RULER's eleven tasks
affects those with an essay as haystack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from hybridtron.limits import shortened
from hybridtron.problems import did_you_mean
from hybridtron.tasks import GROUPS, TASKS
from hybridtron.tasks.base import MOST_OPTION, Task, TaskError

LONGEST_NUMBER = 100  # characters of a number that are parsed
TRUTH = {"true": True, "false": False}


def options_of(task: Task) -> dict[str, object]:
    """Return a task's options with their values."""
    return {field.name: getattr(task, field.name) for field in fields(task) if field.name != "name"}  # pyrefly: ignore


def named(name: str, settings: Sequence[str] = ()) -> Task:
    """Return a registered task with options set from `NAME=VALUE` strings.

    Raises TaskError for an unknown task, an unknown option, or an invalid value.
    """
    if name not in TASKS:
        raise TaskError(
            f"there is no task {name}{did_you_mean(name, TASKS)}; `hybridtron tasks list` names all",
            code="unknown-name",
        )
    task = TASKS[name]
    known = options_of(task)
    changed = {}
    for setting in settings:
        option, _, text = setting.partition("=")
        if option not in known or not text:
            names = ", ".join(known) or "none"
            raise TaskError(
                f"{name}: {setting}: an option is set by NAME=VALUE{did_you_mean(option, known)}; it has {names}",
                code="unknown-name",
            )
        changed[option] = _read(name, option, text, known[option])
    return replace(task, **changed)  # pyrefly: ignore


def all_named(names: Sequence[str], settings: Sequence[str] = ()) -> list[Task]:
    """Return the tasks of several names or groups, each with those options that it has.

    Raises TaskError if none of the tasks has an option.
    """
    tasks = [named(name) for name in members(names)]
    options = {task.name: options_of(task) for task in tasks}
    shared = {setting for setting in settings if any(_option(setting) in known for known in options.values())}
    return [
        named(task_name, [s for s in settings if s not in shared or _option(s) in options[task_name]])
        for task_name in options
    ]


def _option(setting: str) -> str:
    return setting.partition("=")[0]


def members(names: Sequence[str]) -> list[str]:
    """Replace groups by their tasks' names; each task is listed once."""
    return list(dict.fromkeys(member for name in names for member in GROUPS.get(name, (name,))))


def _read(name: str, option: str, text: str, default: object) -> object:
    """Convert a value to its option's type. Raises TaskError if it can't be, or is too large."""
    try:
        if isinstance(default, bool):
            return TRUTH[text.lower()]
        value = type(default)(text[:LONGEST_NUMBER] if isinstance(default, int) else text)  # pyrefly: ignore
        if isinstance(value, int) and abs(value) > MOST_OPTION:
            raise TaskError(f"{name}: {option}={shortened(text)}: must be at most {MOST_OPTION:,}", code="out-of-range")
        return value
    except TaskError:
        raise
    except (ValueError, KeyError) as error:
        raise TaskError(
            f"{name}: {option}={text}: must be of type {type(default).__name__}, such as {default}", code="wrong-type"
        ) from error
