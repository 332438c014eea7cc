"""Load a typed `Config` from the command line: Hydra composes the groups, then each `key=value` overrides a value.

A group is a subfolder of configs/, from which an argument chooses one file: `recipe=samba_421m`. Hydra reads these
files, and the user's own files (`outside.py`). `model=NAME` uses the model from another recipe, so that each model is
defined only in the recipe that trains it. Each `key=value` is applied separately, so that all mistakes are reported
together. For an unknown key, the report suggests the key that the user probably meant. `weights.py` resolves values
that a recipe takes from the checkpoint in `run.weights`. Nothing here needs torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, StringNode
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from hybridtron.config import weights
from hybridtron.config.composed import composed_of, model_of
from hybridtron.config.nulls import remove_null_mixtures, without_null_mixtures
from hybridtron.config.outside import (
    Choice,
    OutsideFile,
    chosen,
    groups_of,
    is_file,
    is_path,
    own_folder,
)
from hybridtron.config.saved import leaves, read_saved, secrets_from_environment
from hybridtron.config.schema import Config
from hybridtron.config.suggestions import (
    node_of,
    not_a_value,
    not_settings,
    unknown_key,
    unresolved,
    without_spaces,
    wrong_value,
)
from hybridtron.problems import ConfigError, Problem
from hybridtron.resources import shipped

# CSafeDumper is thirty times faster than SafeDumper, but PyYAML may have been built without it.
_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})

ALIASES = {"checkpoint.async": "checkpoint.asynchronous"}  # `async` is a Python keyword, so no field can have this name
CONFIGS = shipped("configs")
NO_NAME = ": write `run: {name: NAME}` into the recipe, or set run.name=NAME; NAME also names the run's folder"
LETTERS = re.compile(r"(model|phases\.\d+)\.layers")  # keys whose entries are letters of the pattern
LETTER = re.compile(LETTERS.pattern + r"\.")
FREE_NAMES = ("cluster.environment.", "run.force_ops.")  # dictionaries with arbitrary keys
RENAMED = {"of_weights": "from_checkpoint"}  # former name of a choice -> present name


def load(arguments: Sequence[str], configs: Path = CONFIGS) -> Config:
    """Return the configuration for command-line arguments such as `recipe=laptop` and `run.seed=1`.

    Raises ConfigError with all unknown keys and all values with a wrong type.
    """
    groups = groups_of(configs)
    arguments, problems = without_spaces(arguments)
    problems += not_settings(arguments, lambda text: _recipe_meant(configs, text))
    settings = [argument.partition("=") for argument in arguments if argument.find("=") > 0]
    named = [(ALIASES.get(key, key), value) for key, _, value in settings]
    values = [(key, value) for key, value in named if key not in groups]
    choices: list[Choice] = []
    for group, name in named:
        if group in groups:
            try:
                choices.append(chosen(group, RENAMED.get(name, name), _known(group, configs)))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    composed = composed_of(configs, [choice for choice in choices if choice.group != "model"])
    for choice in choices:
        if choice.group == "model":
            composed.model = model_of(configs, choice)
    # run.weights is applied before all other arguments: the recipe may take values from the checkpoint in run.weights,
    # and the other arguments may override these values
    of_checkpoint = [value for key, value in values if key == weights.KEY]
    other_values = [(key, value) for key, value in values if key != weights.KEY]
    problems = [p for value in of_checkpoint if (p := _set(composed, weights.KEY, value))]
    try:
        weights.settle(composed)
    except OmegaConfBaseException as error:
        raise ConfigError([*problems, unresolved(error)]) from error
    problems += [p for key, value in other_values if (p := _set(composed, key, value))]
    if missing := weights.unknown(composed):
        # other values may depend on the missing keys, so the configuration can't be resolved
        raise ConfigError([*problems, *missing])
    return _typed(composed, [*problems, *secrets_from_environment(composed)])


def carried(settings: Sequence[str], configs: Path = CONFIGS) -> tuple[list[str], list[OutsideFile]]:
    """Replace paths in settings, such as `recipe=./mine.yaml`, by names. Returns the changed settings and the files.

    `outside.copy_into` copies the files under these names into a copy of configs/. A SLURM job uses the changed
    settings with this copy, so that the job does not depend on the user's files.
    """
    arguments: list[str] = []
    files: list[OutsideFile] = []
    for setting in settings:
        group, _, name = setting.partition("=")
        if group in groups_of(configs):
            file = chosen(group, RENAMED.get(name, name), _known(group, configs)).file
        else:
            file = None
        arguments.append(f"{group}={file.name}" if file else setting)
        files += [file] if file else []
    return arguments, files


def load_saved(path: Path) -> Config:
    """Load the config.yaml that a run has written into its folder or its checkpoint."""
    return _typed(read_saved(path), [])


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML for `load_saved`, with every key, and with interpolations resolved."""
    return yaml.dump(to_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_plain(config: Config) -> dict[str, Any]:
    """Convert the configuration to dictionaries, lists, numbers and strings, with interpolations resolved."""
    plain: Any = _plain(asdict(config))
    if "${" in str(plain):  # the Config was created in Python with unresolved interpolations in its defaults
        plain = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)  # takes 8 to 50 ms
    return plain


def values_by_key(config: Config) -> dict[str, Any]:
    """Return dotted key -> value for every value in the configuration. A dotted key is `phases.0.seq_len`."""
    return dict(_plain_leaves(to_plain(config)))


def _plain_leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each leaf of a nested configuration. Lists of sections are indexed: `phases.0`."""
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        value = {str(index): entry for index, entry in enumerate(value)}
    if not isinstance(value, dict):
        yield key, value
        return
    for name, entry in value.items():
        yield from _plain_leaves(entry, f"{key}.{name}" if key else str(name))


def _plain(value: Any) -> Any:
    """Convert a value recursively: enums to their names, tuples to lists."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Enum):
        return value.name
    return value


def _text(dumper: Any, text: str) -> yaml.ScalarNode:
    """Represent a string in YAML. Strings that look like numbers are quoted.

    Without quotes OmegaConf would load a string such as `1e-3` as a number, although YAML 1.1 does not.
    """
    try:
        float(text)
    except ValueError:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _text)


def choices_of(group: str, configs: Path = CONFIGS) -> list[str]:
    """Return the names of a group's files in `configs`. For the group `model`, recipes' names are included."""
    files = (str(p.relative_to(configs / group).with_suffix("")) for p in (configs / group).rglob("*.yaml"))
    recipes = (p.name.removesuffix(".yaml") for p in (configs / "recipe").glob("*.yaml"))
    return sorted({*files, *(recipes if group == "model" else ())})


def _known(group: str, configs: Path) -> list[str]:
    """Return all names in a group, including names in the user's ./configs."""
    own_configs = own_folder(configs)
    return sorted({*choices_of(group, configs), *(choices_of(group, own_configs) if own_configs else ())})


def _recipe_meant(configs: Path, text: str) -> str | None:
    """Return the recipe's name or path if an argument without a key seems to be a recipe, else None."""
    if is_path(text) and is_file(text):
        path = Path(text).absolute()
        is_shipped = path.is_relative_to(folder := (configs / "recipe").absolute())
        if is_shipped:
            return path.relative_to(folder).with_suffix("").as_posix()
        return text
    if text in _known("recipe", configs):
        return text
    return None


def _set(config: DictConfig, key: str, text: str) -> Problem | None:
    """Apply one `key=value` to the configuration. Returns a problem if the key or the value is wrong, else None."""
    _begin_sections(config, key.rpartition(".")[0])
    open_ended = ".mixture" in key or bool(LETTER.match(key)) or f"{key}.".startswith(FREE_NAMES)
    if not open_ended and (problem := unknown_key(config, key)):
        return problem
    try:
        value = _value(text, is_text=not open_ended and isinstance(node_of(config, key), StringNode))
    except HydraException:
        return not_a_value(key, text)
    try:
        mixture, separator, entry = key.partition(".mixture")
        if separator:
            _mix(config, mixture + separator, entry.strip("."), value)
        elif LETTERS.fullmatch(key) and isinstance(value, dict):
            for letter, options in value.items():
                _set_letter(config, f"{key}.{letter}", options)
        elif re.fullmatch(r"model\.layers\.[^.]+", key):
            _set_letter(config, key, value)
        else:
            if isinstance(value, dict):
                _begin_sections(config, key)
            remove_null_mixtures(config, key, value)
            OmegaConf.update(config, key, without_null_mixtures(value), force_add=open_ended)
    except OmegaConfBaseException as error:
        return wrong_value(config, key, text, error)
    except RecursionError:
        return Problem(key, "malformed", f"is {text!r}, which refers to itself")
    return None


def _begin_sections(config: DictConfig, key: str) -> None:
    """Replace null sections by sections with default values, at the key and along the path to the key."""
    names = key.split(".")
    for depth in range(1, len(names) + 1):
        with suppress(OmegaConfBaseException):  # `unknown_key` reports an unknown key
            node = node_of(config, ".".join(names[:depth]))
            if isinstance(node, DictConfig) and node._is_none() and is_dataclass(schema := node._metadata.ref_type):
                OmegaConf.update(config, ".".join(names[:depth]), OmegaConf.structured(schema), merge=False)


def _set_letter(config: DictConfig, key: str, options: Any) -> None:
    """Override options of `model.layers.LETTER`, the sub-layers that a letter in the pattern stands for.

    If `options` change the mixer's kind, all old options are removed, since the new kind may not have them.
    """
    if key.startswith("model."):
        old_kind = OmegaConf.select(config, f"{key}.kind")
    else:
        old_kind = None
    is_new_kind = isinstance(options, dict) and old_kind is not None and options.get("kind", old_kind) != old_kind
    OmegaConf.update(config, key, options, merge=not is_new_kind, force_add=True)


def _mix(config: DictConfig, mixture: str, entry: str, value: Any) -> None:
    """Override a mixture of data sources in part or in full.

    mixture: key of the mixture, such as `data.mixture`
    entry: old or new entry to set, such as `code.weight`; if empty, `value` replaces the full mixture
    value: the new value; for the full mixture, None removes all sources
    """
    value = {} if value is None and not entry else value
    if not entry:
        OmegaConf.update(config, mixture, {}, merge=False)
    for name in reversed(entry.split(".") if entry else []):
        value = {name: value}
    OmegaConf.update(config, mixture, value, force_add=True)


def _value(text: str, is_text: bool) -> Any:
    """Parse a value with Hydra's grammar.

    `is_text` is True if the key needs a string, as `model.pattern` does. Then a text that the grammar rejects, or
    parses as a number or a list, is returned unchanged: `(M-)*2`.
    """
    try:
        value = OverridesParser.create().parse_override(f"value={text}").value()
    except HydraException:
        if is_text:
            return text
        raise
    if not is_text or value is None or isinstance(value, str):
        return value
    return text


def _typed(config: Any, problems: list[Problem]) -> Config:
    """Convert to `Config`. Raises ConfigError if `problems` is not empty, or if the conversion finds more problems."""
    typed = None
    try:
        problems += list(_unusable(config))
        if not problems:
            typed = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # an interpolation without a target
        problems.append(unresolved(error))
    except RecursionError:
        problems.append(Problem("configuration", "malformed", "has a ${...} that refers to itself"))
    if problems:
        raise ConfigError(problems)
    assert isinstance(typed, Config)
    return typed


def _unusable(config: Any) -> Iterator[Problem]:
    """Report keys without a value, and numbers that are not finite.

    Later checks need finite numbers: comparisons such as `x <= 0` would not find nan.
    """
    for key, parent, name in leaves(config):
        if OmegaConf.is_missing(parent, name):
            yield Problem(key, "missing", "must be set" + (NO_NAME if key == "run.name" else ""))
            continue
        with suppress(InterpolationToMissingValueError):  # the missing value is reported under its own key
            value = parent[name]
            if isinstance(value, float) and not math.isfinite(value):
                yield Problem(key, "out-of-range", f"is {value}, must be a finite number")
