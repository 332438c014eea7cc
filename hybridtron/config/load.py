"""From the command line to a typed `Config`: Hydra composes the groups, then each `key=value` overrides a value.

`group=name` (such as `recipe=samba_421m`) goes to Hydra. `model=name` replaces the model by that of another recipe, so
that a model is written down once, with the run that trains it. Values are set here, one by one, so that all mistakes
are reported together, each with the key that was probably meant. What a recipe takes from the checkpoint that
`run.weights` names is resolved by `weights.py`. Nothing in this file needs torch.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from hybridtron.config import weights
from hybridtron.config.mistakes import node_of, not_a_value, not_settings, unknown_key, unresolved, wrong_value
from hybridtron.config.saved import leaves, read_saved, secrets_from_environment
from hybridtron.config.schema import Config, ModelConfig
from hybridtron.problems import ConfigError, Problem, did_you_mean
from hybridtron.shipped import shipped

# Thirty times as quick in C, which a PyYAML that was built from source may lack.
_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})

ALIASES = {"checkpoint.async": "checkpoint.asynchronous"}  # a keyword of Python's can't name a field
CONFIGS = shipped("configs")
RENAMED = {"of_weights": "from_checkpoint"}  # former names of choices


def load(arguments: Sequence[str], configs: Path = CONFIGS) -> Config:
    """Compose what the arguments ask for. Raises ConfigError with every unknown key and ill-typed value."""
    groups = {p.name for p in configs.iterdir() if p.is_dir()}
    found = list(not_settings(arguments))
    settings = [argument.partition("=") for argument in arguments if argument.find("=") > 0]
    named = [(ALIASES.get(key, key), value) for key, _, value in settings]
    choices = [(key, RENAMED.get(value, value)) for key, value in named if key in groups]
    values = [(key, value) for key, value in named if key not in groups]
    found += [p for group, name in choices if (p := _unknown_choice(configs, group, name))]
    if found:
        raise ConfigError(found)
    composed = _composed(configs, [f"{group}={name}" for group, name in choices if group != "model"])
    for group, name in choices:
        if group == "model":
            composed.model = _model(configs, name)
    # run.weights comes first, wherever it stands on the command line: the recipe takes values from that checkpoint, and
    # the other arguments may override what came from there.
    of_checkpoint = [value for key, value in values if key == weights.KEY]
    others = [(key, value) for key, value in values if key != weights.KEY]
    found = [p for value in of_checkpoint if (p := _set(composed, weights.KEY, value))]
    try:
        weights.settle(composed)
    except OmegaConfBaseException as error:
        raise ConfigError([*found, unresolved(error)]) from error
    found += [p for key, value in others if (p := _set(composed, key, value))]
    if missing := weights.unknown(composed):  # nothing that hangs on them can be looked up
        raise ConfigError([*found, *missing])
    return _typed(composed, [*found, *secrets_from_environment(composed)])


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


def _model(configs: Path, name: str) -> DictConfig:
    """The model of a recipe, or of a file of its own."""
    if (file := configs / "model" / f"{name}.yaml").is_file():
        model = OmegaConf.structured(ModelConfig)
        model.merge_with(OmegaConf.load(file))
        return model
    return _composed(configs, [f"recipe={name}"]).model


def _unknown_choice(configs: Path, group: str, name: str) -> Problem | None:
    names = choices_of(group, configs)
    if name in names:
        return None
    return Problem(group, f"has no {name!r}{did_you_mean(name, names) or '; have: ' + ', '.join(names)}")


def _composed(configs: Path, choices: list[str]) -> DictConfig:
    """A copy of what Hydra composes: that takes 0.15 s, and sweeps and suites ask for the same again and again."""
    files = sorted((str(p), (found := p.stat()).st_mtime_ns, found.st_size) for p in configs.rglob("*.yaml"))
    return pickle.loads(_composed_once(configs.absolute(), tuple(choices), tuple(files)))


@lru_cache(maxsize=256)
def _composed_once(configs: Path, choices: tuple[str, ...], files: tuple[tuple[str, int, int], ...]) -> bytes:
    """Pickled, as that is quicker to copy. `files` are those that Hydra may read: an edited one is read again."""
    ConfigStore.instance().store("schema", Config)
    weights.register()
    try:
        with initialize_config_dir(str(configs), version_base=None):
            return pickle.dumps(compose("config", list(choices)))
    except MissingConfigException as error:
        raise ConfigError([Problem("recipe", str(error).splitlines()[0])]) from error
    except (HydraException, yaml.YAMLError) as error:
        messages = [line for line in str(error).splitlines() if "_type=" not in line]
        raise ConfigError([Problem("recipe", "does not compose: " + "\n".join(messages))]) from error


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
            OmegaConf.update(config, key, value, force_add=open_ended)
    except OmegaConfBaseException as error:
        return wrong_value(config, key, text, error)
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
    """Override one entry of a mixture, which may be new, or replace the mixture."""
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
    if found:
        raise ConfigError(found)
    assert isinstance(typed, Config)
    return typed


def _unusable(config: Any) -> Iterator[Problem]:
    """Keys without a value, and numbers that are not finite: nan slips through every rule of the form `x <= 0`."""
    for key, parent, name in leaves(config):
        if OmegaConf.is_missing(parent, name):
            yield Problem(key, "must be set")
        elif isinstance(value := parent[name], float) and not math.isfinite(value):
            yield Problem(key, f"is {value}, must be a finite number")
