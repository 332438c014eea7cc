"""From the command line to a typed `Config`: Hydra composes the groups, then each `key=value` overrides a value.

`group=name` (such as `recipe=samba_421m`) goes to Hydra, as do files of the user's own (`outside.py`). `model=name`
replaces the model by that of another recipe, so that a model is written down once, with the run that trains it. Values
are set here, one by one, so that all mistakes are reported together, each with the key that was probably meant. What a
recipe takes from the checkpoint that `run.weights` names is resolved by `weights.py`. Nothing in this file needs torch.
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

# Thirty times as quick in C, which a PyYAML that was built from source may lack.
_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})

ALIASES = {"checkpoint.async": "checkpoint.asynchronous"}  # a keyword of Python's can't name a field
CONFIGS = shipped("configs")
NO_NAME = ": write `run: {name: NAME}` into the recipe, or give run.name=NAME; the run's folder is called so"
RENAMED = {"of_weights": "from_checkpoint"}  # former names of choices


def load(arguments: Sequence[str], configs: Path = CONFIGS) -> Config:
    """Compose what the arguments ask for. Raises ConfigError with every unknown key and ill-typed value."""
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
    # run.weights comes first, wherever it stands on the command line: the recipe takes values from that checkpoint, and
    # the other arguments may override what came from there.
    of_checkpoint = [value for key, value in values if key == weights.KEY]
    others = [(key, value) for key, value in values if key != weights.KEY]
    problems = [p for value in of_checkpoint if (p := _set(composed, weights.KEY, value))]
    try:
        weights.settle(composed)
    except OmegaConfBaseException as error:
        raise ConfigError([*problems, unresolved(error)]) from error
    problems += [p for key, value in others if (p := _set(composed, key, value))]
    if missing := weights.unknown(composed):  # nothing that hangs on them can be looked up
        raise ConfigError([*problems, *missing])
    return _typed(composed, [*problems, *secrets_from_environment(composed)])


def carried(settings: Sequence[str], configs: Path = CONFIGS) -> tuple[list[str], list[OutsideFile]]:
    """Replace paths in settings by names, for a copy of configs/ that gets the files; returns both."""
    kept: list[str] = []
    files: list[OutsideFile] = []
    for setting in settings:
        group, _, name = setting.partition("=")
        file = (
            chosen(group, RENAMED.get(name, name), _known(group, configs)).file if group in groups_of(configs) else None
        )
        kept.append(f"{group}={file.name}" if file else setting)
        files += [file] if file else []
    return kept, files


def load_saved(path: Path) -> Config:
    """The configuration that a run wrote beside its checkpoints."""
    return _typed(read_saved(path), [])


def to_yaml(config: Config) -> str:
    """The configuration as `load_saved` reads it: complete, with nothing left to look up."""
    return yaml.dump(to_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_plain(config: Config) -> dict[str, Any]:
    """The same as dictionaries, lists, numbers and text."""
    plain: Any = _plain(asdict(config))
    if "${" in str(plain):  # made in Python: nothing has looked up what a default refers to
        plain = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)  # 8 to 50 ms
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.name if isinstance(value, Enum) else value


def _text(dumper: Any, text: str) -> yaml.ScalarNode:
    """Quotes what OmegaConf would read as a number and YAML 1.1 would not, such as 1e-3."""
    try:
        float(text)
    except ValueError:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _text)


def choices_of(group: str, configs: Path = CONFIGS) -> list[str]:
    """The names that a group can be set to: `choices_of("recipe")`."""
    files = (str(p.relative_to(configs / group).with_suffix("")) for p in (configs / group).rglob("*.yaml"))
    recipes = (p.name.removesuffix(".yaml") for p in (configs / "recipe").glob("*.yaml"))
    return sorted({*files, *(recipes if group == "model" else ())})


def _known(group: str, configs: Path) -> list[str]:
    """The names of a group, those of the user's configs/ too."""
    own_configs = own_folder(configs)
    return sorted({*choices_of(group, configs), *(choices_of(group, own_configs) if own_configs else ())})


def _recipe_meant(configs: Path, text: str) -> str | None:
    """Find the recipe that an argument without a key means; None where it means none."""
    if is_path(text) and is_file(text):
        path = Path(text).absolute()
        inside = path.is_relative_to(folder := (configs / "recipe").absolute())
        return path.relative_to(folder).with_suffix("").as_posix() if inside else text
    return text if text in _known("recipe", configs) else None


def _set(config: DictConfig, key: str, text: str) -> Problem | None:
    """Apply one `key=value` to the configuration; return what is wrong with it, if anything is."""
    _begin_sections(config, key.rpartition(".")[0])
    open_ended = any(part in key for part in (".layers.", ".mixture", "cluster.environment."))
    if not open_ended and (problem := unknown_key(config, key)):
        return problem
    try:
        value = _value(text, is_text=not open_ended and isinstance(node_of(config, key), StringNode))
    except HydraException:
        return not_a_value(key, text)
    try:
        mixture, inside, entry = key.partition(".mixture")
        if inside:
            _mix(config, mixture + inside, entry.strip("."), value)
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
        return Problem(key, f"is {text!r}, which refers to itself")
    return None


def _begin_sections(config: DictConfig, key: str) -> None:
    """Where a section on the way to a key is null, and this one included, begin it with its defaults."""
    names = key.split(".")
    for depth in range(1, len(names) + 1):
        with suppress(OmegaConfBaseException):  # `unknown_key` says what is wrong with it
            node = node_of(config, ".".join(names[:depth]))
            if isinstance(node, DictConfig) and node._is_none() and is_dataclass(schema := node._metadata.ref_type):
                OmegaConf.update(config, ".".join(names[:depth]), OmegaConf.structured(schema), merge=False)


def _set_letter(config: DictConfig, key: str, options: Any) -> None:
    """Override options of a letter; one of another kind starts from its defaults, as it does not know these options."""
    before = OmegaConf.select(config, f"{key}.kind") if key.startswith("model.") else None
    another = isinstance(options, dict) and before is not None and options.get("kind", before) != before
    OmegaConf.update(config, key, options, merge=not another, force_add=True)


def _mix(config: DictConfig, mixture: str, entry: str, value: Any) -> None:
    """Override one entry of a mixture, which may be new, or replace the mixture; null leaves none."""
    value = {} if value is None and not entry else value
    if not entry:
        OmegaConf.update(config, mixture, {}, merge=False)
    for name in reversed(entry.split(".") if entry else []):
        value = {name: value}
    OmegaConf.update(config, mixture, value, force_add=True)


def _value(text: str, is_text: bool) -> Any:
    """What was written, by Hydra's grammar; a key that holds text takes it as it is: `model.pattern=(M-)*2`."""
    try:
        value = OverridesParser.create().parse_override(f"value={text}").value()
    except HydraException:
        if is_text:
            return text
        raise
    return value if not is_text or value is None or isinstance(value, str) else text


def _typed(config: Any, found: list[Problem]) -> Config:
    typed = None
    try:
        found += list(_unusable(config))
        if not found:
            typed = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        found.append(unresolved(error))
    except RecursionError:
        found.append(Problem("configuration", "has a ${...} that refers to itself"))
    if found:
        raise ConfigError(found)
    assert isinstance(typed, Config)
    return typed


def _unusable(config: Any) -> Iterator[Problem]:
    """Keys without a value, and numbers that are not finite: nan slips through every rule of the form `x <= 0`."""
    for key, parent, name in leaves(config):
        if OmegaConf.is_missing(parent, name):
            yield Problem(key, "must be set" + (NO_NAME if key == "run.name" else ""))
            continue
        with suppress(InterpolationToMissingValueError):  # what it leads to is reported itself
            value = parent[name]
            if isinstance(value, float) and not math.isfinite(value):
                yield Problem(key, f"is {value}, must be a finite number")
