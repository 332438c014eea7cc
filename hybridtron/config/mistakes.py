"""Guess the key or value that a user meant, for error messages.

A wrong key is answered with the closest known one: first below the same parent, then anywhere, as most newcomers write
`lr=1e-3` for `phases.0.lr=1e-3`. A value of the wrong type is answered with the type that the key holds.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from omegaconf import BooleanNode, DictConfig, EnumNode, FloatNode, IntegerNode, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridtron.config.saved import leaves
from hybridtron.problems import Problem, did_you_mean

# Other trainers' names of our keys, which are too different for did_you_mean to find.
NAMES_ELSEWHERE = {
    "batch_size": "global_batch",
    "global_batch_size": "global_batch",
    "learning_rate": "lr",
    "micro_batch_size": "micro_batch",
    "output_dir": "dir",
    "sequence_length": "seq_len",
    "steps": "max_steps",
}


CONFIG_OPTIONS = ("config", "config_dir", "config_file", "config_name", "config_path")  # other programs' options


def without_spaces(arguments: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Remove arguments that spaces have split, such as `recipe = laptop`.

    Returns the remaining arguments and a problem for each one removed.
    """
    left = list(arguments)
    problems = []
    at = 1
    while at < len(left):
        key = left[at - 1]
        value = left[at]
        whole = "=" not in key.removesuffix("=") and "=" not in value.removeprefix("=") and not value.startswith("-")
        if whole and value == "=" and at + 1 < len(left):
            pieces = [key, value, left[at + 1]]
        elif whole and value != "=" and (value.startswith("=") or key.endswith("=")):
            pieces = [key, value]
        else:
            at += 1
            continue
        del left[at - 1 : at - 1 + len(pieces)]
        problems.append(Problem(" ".join(pieces), "malformed", f"has spaces: write {''.join(pieces)}"))
    return left, problems


def not_settings(arguments: Sequence[str], recipe_meant: Callable[[str], str | None]) -> Iterator[Problem]:
    """Report arguments that are not key=value, among them options such as `--recipe samba_421m`.

    `recipe_meant` returns the recipe that an argument probably names (`laptop`, `configs/recipe/laptop.yaml`), or None.
    """
    taken = None
    for argument, following in zip_longest(arguments, arguments[1:]):
        key, equals, value = argument.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if key.startswith("-") and name:
            if not equals and following is not None and "=" not in following:
                taken = following
            else:
                taken = None
            if name in CONFIG_OPTIONS:
                cure = "name a file of your own by its path, recipe=./mine.yaml, or put it into configs/recipe/ here"
                yield Problem(argument, "unknown-name", f"is not an option: {cure}")
                continue
            yield Problem(
                argument, "malformed", f"is not of the form key=value: write {name}={value or taken or 'VALUE'}"
            )
        elif not (key and equals) and argument is not taken:
            meant = recipe_meant(argument)
            yield Problem(
                argument, "malformed", "is not of the form key=value" + (f": write recipe={meant}" if meant else "")
            )


def unknown_key(config: DictConfig, key: str) -> Problem | None:
    """Return the problem with a key; None if the configuration has the key."""
    node: Any = config
    for depth, name in enumerate(parts := key.split(".")):
        where = ".".join(parts[:depth]) or "the configuration"
        if isinstance(node, ListConfig):
            if not (name.isdigit() and int(name) < len(node)):
                if where == "phases":
                    more = "; further phases are written into a recipe"
                else:
                    more = ""
                return Problem(
                    key, "unknown-name", f"{where} has no entry {name!r}; it has {len(node)}, numbered from 0{more}"
                )
            node = node[int(name)]
        elif isinstance(node, DictConfig) and name in node.keys():  # noqa: SIM118 (a key without value is not `in`)
            node = node._get_node(name)
        else:
            if isinstance(node, DictConfig):
                names = [str(n) for n in node]
            else:
                names = []
            names = names if depth else ["recipe", *names]  # recipe is a group, not a section
            if names:
                known = f"; it has: {', '.join(names)}"
            else:
                known = " below it"
            return Problem(
                key, "unknown-name", f"{where} has no {name!r}{_meant(config, parts[-1], name, names)}{known}"
            )
    return None


def wrong_value(config: DictConfig, key: str, text: str, error: OmegaConfBaseException) -> Problem:
    """Return the problem for a value of the wrong type, with the type that the key expects."""
    node = node_of(config, key)
    if isinstance(node, EnumNode):
        return Problem(key, "unknown-name", f"is {text!r}, must be one of {', '.join(node.enum_type.__members__)}")
    for kind, holds in (
        (BooleanNode, "true or false"),
        (IntegerNode, "a whole number"),
        (FloatNode, "a number such as 1e-3"),
        (ListConfig, "a list such as [1,2]"),
        (DictConfig, "options such as {kind: mamba, state: 16}" if ".layers" in key else _entries(key, node)),
    ):
        if isinstance(node, kind):
            return Problem(key, "wrong-type", f"is {text!r}, must be {holds}")
    return Problem(key, "wrong-type", str(error).splitlines()[0])


def _entries(key: str, node: object) -> str:
    """Describe a section's content: its keys if it has any, else entries in braces."""
    if isinstance(node, DictConfig):
        keys = [str(name) for name in node]
    else:
        keys = []
    if keys:
        return f"set by its keys: {', '.join(f'{key}.{name}' for name in keys)}"
    return "entries in braces"


def not_a_value(key: str, text: str) -> Problem:
    """Return the problem for a value that Hydra's grammar cannot parse."""
    if key.rpartition(".")[2] == "layers":
        return Problem(
            key, "malformed", f"{text!r} is not a value: set one letter or option at a time, as in {key}.M.kind=mamba2"
        )
    return Problem(key, "malformed", f"{text!r} is not a value (quote it if it holds brackets, commas or colons)")


def unresolved(error: OmegaConfBaseException) -> Problem:
    """Return the problem for a `${...}` without a target, or for any other fault that OmegaConf reports."""
    return Problem(str(error.full_key or "configuration"), "unknown-name", str(error).splitlines()[0])


def _meant(config: DictConfig, leaf: str, name: str, names: Sequence[str]) -> str:
    """Return a hint at a name below the same parent, or else at a key with that name anywhere; else an empty text."""
    if hint := did_you_mean(name, names):
        return hint
    # phases first, as they have most keys that newcomers set
    known = sorted((key for key, _, _ in leaves(config)), key=lambda candidate: not candidate.startswith("phases."))
    keys = dict(reversed([(key.rpartition(".")[2], key) for key in known]))
    close = [NAMES_ELSEWHERE.get(leaf, leaf), *difflib.get_close_matches(leaf, keys, 1, cutoff=0.8)]
    return next((f" (did you mean {keys[candidate]}?)" for candidate in close if candidate in keys), "")


def node_of(config: DictConfig, key: str) -> Any:
    """Return the OmegaConf node at a key; None if there is none."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if isinstance(node, ListConfig):
        if name.isdigit() and int(name) < len(node):
            return node._get_node(int(name))
        return None
    if isinstance(node, DictConfig):
        return node._get_node(name, validate_access=False)
    return None
