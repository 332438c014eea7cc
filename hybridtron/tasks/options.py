"""Looks up tasks by name and sets their options: `named("passkey", ["digits=3"])`.

A group's name stands for several tasks. An option that is set for a group is set in all tasks of the group that have
this option. For instance, `essay=...` for the group `ruler` is set only in tasks that have the option `essay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from hybridtron.limits import shortened
from hybridtron.problems import did_you_mean
from hybridtron.tasks import GROUPS, TASKS
from hybridtron.tasks.base import MAX_OPTION, Task, TaskError

MAX_NUMBER_CHARACTERS = 100  # an integer's text is cut to this length before it is parsed
TRUTH = {"true": True, "false": False}


def options_of(task: Task) -> dict[str, object]:
    """Return a task's options with their values."""
    return {field.name: getattr(task, field.name) for field in fields(task) if field.name != "name"}  # pyrefly: ignore


def named(name: str, settings: Sequence[str] = ()) -> Task:
    """Return a registered task with options set from `OPTION=VALUE` strings.

    Raises TaskError for an unknown task, an unknown option, or an invalid value.
    """
    if name not in TASKS:
        raise TaskError(
            f"there is no task {name}{did_you_mean(name, TASKS)}; `hybridtron tasks list` lists all tasks",
            code="unknown-name",
        )
    task = TASKS[name]
    options = options_of(task)
    changed = {}
    for setting in settings:
        option, _, text = setting.partition("=")
        if option not in options or not text:
            names = ", ".join(options) or "none"
            raise TaskError(
                f"{name}: {setting}: sets no option{did_you_mean(option, options)}; write OPTION=VALUE, for {names}",
                code="unknown-name",
            )
        changed[option] = _read(name, option, text, options[option])
    return replace(task, **changed)  # pyrefly: ignore


def all_named(names: Sequence[str], settings: Sequence[str] = ()) -> list[Task]:
    """Return the tasks of several names or groups, and set each option in all tasks that have this option.

    Raises TaskError for an option that none of the tasks has.
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
    """Return the names with each group replaced by its tasks; no task is listed twice."""
    return list(dict.fromkeys(member for name in names for member in GROUPS.get(name, (name,))))


def _read(name: str, option: str, text: str, default: object) -> object:
    """Parse an option's text to a value with the type of the default.

    Raises TaskError if the text has another type, or the number is too large.
    """
    try:
        if isinstance(default, bool):
            return TRUTH[text.lower()]
        value = type(default)(text[:MAX_NUMBER_CHARACTERS] if isinstance(default, int) else text)  # pyrefly: ignore
        if isinstance(value, int) and abs(value) > MAX_OPTION:
            raise TaskError(f"{name}: {option}={shortened(text)}: must be at most {MAX_OPTION:,}", code="out-of-range")
        return value
    except TaskError:
        raise
    except (ValueError, KeyError) as error:
        raise TaskError(
            f"{name}: {option}={text}: must be of type {type(default).__name__}, such as {default}", code="wrong-type"
        ) from error
