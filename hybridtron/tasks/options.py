"""A task by its name, with options: `named("passkey", ["digits=3"])`. Groups are names of several tasks.

Of several tasks each gets the options that it has: `essay` of RULER's eleven is that of their needles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from hybridtron.limits import shortened
from hybridtron.problems import did_you_mean
from hybridtron.tasks import GROUPS, TASKS
from hybridtron.tasks.base import MOST_OPTION, Task, TaskError

LONGEST_NUMBER = 100  # characters that are looked at
TRUTH = {"true": True, "false": False}


def options_of(task: Task) -> dict[str, object]:
    """The options of a task and what they are set to."""
    return {one.name: getattr(task, one.name) for one in fields(task) if one.name != "name"}  # pyrefly: ignore


def named(name: str, settings: Sequence[str] = ()) -> Task:
    """A task of the registry; TaskError where there is none, or an option can't be set so."""
    if name not in TASKS:
        raise TaskError(f"there is no task {name}{did_you_mean(name, TASKS)}; `hybridtron tasks list` names all")
    task = TASKS[name]
    known = options_of(task)
    changed = {}
    for setting in settings:
        option, _, text = setting.partition("=")
        if option not in known or not text:
            names = ", ".join(known) or "none"
            raise TaskError(
                f"{name}: {setting}: an option is set by NAME=VALUE{did_you_mean(option, known)}; it has {names}"
            )
        changed[option] = _read(name, option, text, known[option])
    return replace(task, **changed)  # pyrefly: ignore


def all_named(names: Sequence[str], settings: Sequence[str] = ()) -> list[Task]:
    """The tasks of names and groups; TaskError where none of them has an option."""
    tasks = [named(name) for name in members(names)]
    options = {task.name: options_of(task) for task in tasks}
    shared = {setting for setting in settings if any(_option(setting) in known for known in options.values())}
    return [named(one, [s for s in settings if s not in shared or _option(s) in options[one]]) for one in options]


def _option(setting: str) -> str:
    return setting.partition("=")[0]


def members(names: Sequence[str]) -> list[str]:
    """Names of tasks and groups -> names of tasks, each once."""
    return list(dict.fromkeys(member for name in names for member in GROUPS.get(name, (name,))))


def _read(name: str, option: str, text: str, default: object) -> object:
    try:
        if isinstance(default, bool):
            return TRUTH[text.lower()]
        value = type(default)(text[:LONGEST_NUMBER] if isinstance(default, int) else text)  # pyrefly: ignore
        if isinstance(value, int) and abs(value) > MOST_OPTION:
            raise TaskError(f"{name}: {option}={shortened(text)}: must be at most {MOST_OPTION:,}")
        return value
    except TaskError:
        raise
    except (ValueError, KeyError) as error:
        raise TaskError(f"{name}: {option}={text}: is of type {type(default).__name__}, such as {default}") from error
