"""Load a typed `Config` from the command line: Hydra composes the groups, then each `key=value` overrides a value.

`group=name` (such as `recipe=samba_421m`) goes to Hydra, as do the user's own files (`outside.py`). `model=name`
replaces the model by that of another recipe, so that a model needs to be defined only once, with the run that trains
it. Each value is set separately, so that all mistakes are reported together, each with the key that was probably meant.
`weights.py` resolves the values that a recipe takes from the checkpoint in `run.weights`. Nothing here needs torch.
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
from hybridtron.config.mistakes import (
    node_of,
    not_a_value,
    not_settings,
    unknown_key,
    unresolved,
    without_spaces,
    wrong_value,
)
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
from hybridtron.problems import ConfigError, Problem
from hybridtron.shipped import shipped

# The C dumper is thirty times as fast, but a PyYAML that was built from source may lack it.
_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})

ALIASES = {"checkpoint.async": "checkpoint.asynchronous"}  # a Python keyword can't name a field
CONFIGS = shipped("configs")
NO_NAME = ": write `run: {name: NAME}` into the recipe, or give run.name=NAME; the run's folder is called so"
FREE_NAMES = ("cluster.environment.", "run.force_ops.")  # mappings whose names the schema does not know
RENAMED = {"of_weights": "from_checkpoint"}  # former names of choices


def load(arguments: Sequence[str], configs: Path = CONFIGS) -> Config:
    """Compose the configuration of these arguments. Raises ConfigError with every unknown key and ill-typed value."""
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
    # run.weights comes first, regardless of its position on the command line: the recipe takes values from that
    # checkpoint, and the other arguments may override those values.
    of_checkpoint = [value for key, value in values if key == weights.KEY]
    others = [(key, value) for key, value in values if key != weights.KEY]
    problems = [p for value in of_checkpoint if (p := _set(composed, weights.KEY, value))]
    try:
        weights.settle(composed)
    except OmegaConfBaseException as error:
        raise ConfigError([*problems, unresolved(error)]) from error
    problems += [p for key, value in others if (p := _set(composed, key, value))]
    if missing := weights.unknown(composed):  # values that depend on these keys cannot be resolved
        raise ConfigError([*problems, *missing])
    return _typed(composed, [*problems, *secrets_from_environment(composed)])


def carried(settings: Sequence[str], configs: Path = CONFIGS) -> tuple[list[str], list[OutsideFile]]:
    """Replace file paths in settings by names, for a copy of configs/ that will contain the files.

    Returns the settings and the files.
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
    """Load the configuration that a run wrote beside its checkpoints."""
    return _typed(read_saved(path), [])


def to_yaml(config: Config) -> str:
    """Write the configuration as YAML for `load_saved`: every key, with interpolations resolved."""
    return yaml.dump(to_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_plain(config: Config) -> dict[str, Any]:
    """Convert the configuration to dictionaries, lists, numbers and text, with interpolations resolved."""
    plain: Any = _plain(asdict(config))
    if "${" in str(plain):  # a Config made in Python: its defaults' interpolations are not resolved yet
        plain = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)  # 8 to 50 ms
    return plain


def values_by_key(config: Config) -> dict[str, Any]:
    """Return every value of the configuration by its dotted key, such as `phases.0.seq_len`."""
    return dict(_plain_leaves(to_plain(config)))


def _plain_leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a nested configuration, with its dotted key. An index into a list of sections is a key too."""
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        value = {str(index): entry for index, entry in enumerate(value)}
    if not isinstance(value, dict):
        yield key, value
        return
    for name, entry in value.items():
        yield from _plain_leaves(entry, f"{key}.{name}" if key else str(name))


def _plain(value: Any) -> Any:
    """Convert a value recursively; enums become their names, tuples become lists."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Enum):
        return value.name
    return value


def _text(dumper: Any, text: str) -> yaml.ScalarNode:
    """Represent text in YAML, quoted if OmegaConf would read it as a number and YAML 1.1 would not: 1e-3."""
    try:
        float(text)
    except ValueError:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _text)


def choices_of(group: str, configs: Path = CONFIGS) -> list[str]:
    """Return the package's names for a group: `choices_of("recipe")`. Each recipe is also a model."""
    files = (str(p.relative_to(configs / group).with_suffix("")) for p in (configs / group).rglob("*.yaml"))
    recipes = (p.name.removesuffix(".yaml") for p in (configs / "recipe").glob("*.yaml"))
    return sorted({*files, *(recipes if group == "model" else ())})


def _known(group: str, configs: Path) -> list[str]:
    """Return all names for a group, including those in the user's configs/."""
    own_configs = own_folder(configs)
    return sorted({*choices_of(group, configs), *(choices_of(group, own_configs) if own_configs else ())})


def _recipe_meant(configs: Path, text: str) -> str | None:
    """Return the recipe that an argument without a key probably means, by name or path; else None."""
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
    open_ended = any(part in key for part in (".layers.", ".mixture")) or f"{key}.".startswith(FREE_NAMES)
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
        elif key.endswith(".layers") and isinstance(value, dict):
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
    """Fill null sections on the path to a key, and at the key itself, with their defaults."""
    names = key.split(".")
    for depth in range(1, len(names) + 1):
        with suppress(OmegaConfBaseException):  # `unknown_key` reports such a key
            node = node_of(config, ".".join(names[:depth]))
            if isinstance(node, DictConfig) and node._is_none() and is_dataclass(schema := node._metadata.ref_type):
                OmegaConf.update(config, ".".join(names[:depth]), OmegaConf.structured(schema), merge=False)


def _set_letter(config: DictConfig, key: str, options: Any) -> None:
    """Override options of a letter. A new kind replaces all options, since it may not know the old ones."""
    if key.startswith("model."):
        before = OmegaConf.select(config, f"{key}.kind")
    else:
        before = None
    another = isinstance(options, dict) and before is not None and options.get("kind", before) != before
    OmegaConf.update(config, key, options, merge=not another, force_add=True)


def _mix(config: DictConfig, mixture: str, entry: str, value: Any) -> None:
    """Override one entry of a mixture, which may be new. Without an entry, replace the mixture; null empties it."""
    value = {} if value is None and not entry else value
    if not entry:
        OmegaConf.update(config, mixture, {}, merge=False)
    for name in reversed(entry.split(".") if entry else []):
        value = {name: value}
    OmegaConf.update(config, mixture, value, force_add=True)


def _value(text: str, is_text: bool) -> Any:
    """Parse a value by Hydra's grammar, except for keys that hold text.

    Text that the grammar reads as something else stays as written: `model.pattern=(M-)*2`.
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


def _typed(config: Any, found: list[Problem]) -> Config:
    """Convert to `Config`. Raises ConfigError with the problems found so far and those of the conversion."""
    typed = None
    try:
        found += list(_unusable(config))
        if not found:
            typed = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        found.append(unresolved(error))
    except RecursionError:
        found.append(Problem("configuration", "malformed", "has a ${...} that refers to itself"))
    if found:
        raise ConfigError(found)
    assert isinstance(typed, Config)
    return typed


def _unusable(config: Any) -> Iterator[Problem]:
    """Report keys without a value, and numbers that are not finite: nan passes every rule of the form `x <= 0`."""
    for key, parent, name in leaves(config):
        if OmegaConf.is_missing(parent, name):
            yield Problem(key, "missing", "must be set" + (NO_NAME if key == "run.name" else ""))
            continue
        with suppress(InterpolationToMissingValueError):  # the missing value is reported under its own key
            value = parent[name]
            if isinstance(value, float) and not math.isfinite(value):
                yield Problem(key, "out-of-range", f"is {value}, must be a finite number")
