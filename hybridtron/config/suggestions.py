"""Find mistakes in `key=value` arguments, and suggest the key or value that the user probably meant.

For an unknown key, a similar key in the same section is suggested, or else a similar key in any section: new users
often write `lr=1e-3` for `phases.0.lr=1e-3`. For a value with the wrong type, the message names the type that the key
needs.
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

# name of a key in other trainers, too different for `did_you_mean` -> name of the key here
NAMES_ELSEWHERE = {
    "batch_size": "global_batch",
    "global_batch_size": "global_batch",
    "learning_rate": "lr",
    "micro_batch_size": "micro_batch",
    "output_dir": "dir",
    "sequence_length": "seq_len",
    "steps": "max_steps",
}


# other programs' options that name a configuration file
CONFIG_OPTIONS = (
    "config",
    "config_dir",
    "config_file",
    "config_name",
    "config_path",
)


def without_spaces(arguments: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Remove settings with spaces, such as `recipe = laptop`, from the arguments.

    The shell splits such a setting into several arguments. Returns the remaining arguments, and a problem for each
    removed setting.
    """
    remaining = list(arguments)
    problems = []
    at = 1
    while at < len(remaining):
        key = remaining[at - 1]
        value = remaining[at]
        is_split = "=" not in key.removesuffix("=") and "=" not in value.removeprefix("=") and not value.startswith("-")
        if is_split and value == "=" and at + 1 < len(remaining):
            pieces = [key, value, remaining[at + 1]]
        elif is_split and value != "=" and (value.startswith("=") or key.endswith("=")):
            pieces = [key, value]
        else:
            at += 1
            continue
        del remaining[at - 1 : at - 1 + len(pieces)]
        problems.append(Problem(" ".join(pieces), "malformed", f"contains spaces: write {''.join(pieces)}"))
    return remaining, problems


def not_settings(arguments: Sequence[str], recipe_meant: Callable[[str], str | None]) -> Iterator[Problem]:
    """Report arguments that do not have the form key=value, including options such as `--recipe samba_421m`.

    `recipe_meant` is a function that gets an argument. It returns the recipe if the argument seems to be a recipe's
    name or file, such as `laptop` or `configs/recipe/laptop.yaml`, and None otherwise.
    """
    option_value = None
    for argument, following in zip_longest(arguments, arguments[1:]):
        key, equals, value = argument.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if key.startswith("-") and name:
            if not equals and following is not None and "=" not in following:
                option_value = following
            else:
                option_value = None
            if name in CONFIG_OPTIONS:
                cure = "name your own file by its path, recipe=./mine.yaml, or put the file into ./configs/recipe"
                yield Problem(argument, "unknown-name", f"is not an option: {cure}")
                continue
            yield Problem(
                argument, "malformed", f"is not of the form key=value: write {name}={value or option_value or 'VALUE'}"
            )
        elif not (key and equals) and argument is not option_value:
            meant = recipe_meant(argument)
            yield Problem(
                argument, "malformed", "is not of the form key=value" + (f": write recipe={meant}" if meant else "")
            )


def unknown_key(config: DictConfig, key: str) -> Problem | None:
    """Return the problem for a key that the configuration does not have; None if it has the key."""
    node: Any = config
    for depth, name in enumerate(parts := key.split(".")):
        where = ".".join(parts[:depth]) or "the configuration"
        if isinstance(node, ListConfig):
            if not (name.isdigit() and int(name) < len(node)):
                if where == "phases":
                    more = "; to add phases, write a recipe"
                else:
                    more = ""
                return Problem(
                    key,
                    "unknown-name",
                    f"{where} has no entry {name!r}; {where} has {len(node)} entries, numbered from 0{more}",
                )
            node = node[int(name)]
        elif isinstance(node, DictConfig) and name in node.keys():  # noqa: SIM118 (a key without value is not `in`)
            node = node._get_node(name)
        else:
            if isinstance(node, DictConfig):
                names = [str(n) for n in node]
            else:
                names = []
            names = names if depth else ["recipe", *names]  # `recipe` can be set too, although it is not a section
            if names:
                hint = f"; {where} has: {', '.join(names)}"
            else:
                hint = ""
            return Problem(
                key, "unknown-name", f"{where} has no {name!r}{_meant(config, parts[-1], name, names)}{hint}"
            )
    return None


def wrong_value(config: DictConfig, key: str, text: str, error: OmegaConfBaseException) -> Problem:
    """Return the problem for a value of the wrong type. The message names the type that the key needs."""
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
    """Return a phrase that says how to set `key`: by the keys of its section, or else as entries in braces."""
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
            key, "malformed", f"{text!r} can't be parsed: set a single letter or option, such as {key}.M.kind=mamba2"
        )
    return Problem(key, "malformed", f"{text!r} can't be parsed: quote texts that contain brackets, commas or colons")


def unresolved(error: OmegaConfBaseException) -> Problem:
    """Return the problem for an OmegaConf error, such as an interpolation `${...}` without a target."""
    return Problem(str(error.full_key or "configuration"), "unknown-name", str(error).splitlines()[0])


def _meant(config: DictConfig, leaf: str, name: str, names: Sequence[str]) -> str:
    """Return a hint such as ` (did you mean phases.0.lr?)`, or an empty text.

    leaf: last part of the unknown key
    name: first part of the unknown key that does not exist in its section
    names: keys in that section

    The hint names a similar key in the same section, or else a key with a last part like `leaf` in any section.
    """
    if hint := did_you_mean(name, names):
        return hint
    # keys of phases first, since users set them most often
    known = sorted((key for key, _, _ in leaves(config)), key=lambda candidate: not candidate.startswith("phases."))
    keys = dict(reversed([(key.rpartition(".")[2], key) for key in known]))
    close = [NAMES_ELSEWHERE.get(leaf, leaf), *difflib.get_close_matches(leaf, keys, 1, cutoff=0.8)]
    return next((f" (did you mean {keys[candidate]}?)" for candidate in close if candidate in keys), "")


def node_of(config: DictConfig, key: str) -> Any:
    """Return the OmegaConf node for a dotted key, or None if the key does not exist."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if isinstance(node, ListConfig):
        if name.isdigit() and int(name) < len(node):
            return node._get_node(int(name))
        return None
    if isinstance(node, DictConfig):
        return node._get_node(name, validate_access=False)
    return None
