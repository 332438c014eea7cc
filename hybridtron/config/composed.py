"""Compose a configuration with Hydra from files in the package's configs/ and the user's ./configs.

A group is a subfolder of configs/, such as recipe/, from which one file is chosen. Nothing here needs torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict

from hybridtron.config import weights
from hybridtron.config.nulls import ComposedConfig, typed
from hybridtron.config.outside import OF_PATH, Choice, clashes, groups_of, own_folder, quoted, without_package
from hybridtron.config.schema import ModelConfig
from hybridtron.problems import ConfigError, Problem


def model_of(configs: Path, choice: Choice) -> DictConfig:
    """Return the model in configs/model/NAME.yaml, or else the section `model` of the recipe NAME.

    NAME is `choice.name`. `configs` is the package's folder, which is searched before the user's ./configs.
    """
    for folder in (configs, own_folder(configs)):
        if folder is not None and (file := folder / "model" / f"{choice.name}.yaml").is_file():
            model = OmegaConf.structured(ModelConfig)
            model.merge_with(OmegaConf.load(file))
            return model
    return composed_of(configs, [replace(choice, group="recipe")]).model


def composed_of(configs: Path, choices: Sequence[Choice]) -> DictConfig:
    """Compose the chosen files. Returns a new copy, which the caller may change.

    The composition is cached, since Hydra takes 0.15 s, and the runs of a sweep often need the same composition.
    """
    folders = [configs.absolute(), *([extra] if (extra := own_folder(configs)) else [])]
    paths = (path for folder in folders for group in groups_of(configs) for path in (folder / group).rglob("*.yaml"))
    files = sorted((str(p), (stat := p.stat()).st_mtime_ns, stat.st_size) for p in [configs / "config.yaml", *paths])
    return pickle.loads(_composed_once(tuple(folders), tuple(choices), tuple(files)))


@lru_cache(maxsize=1024)
def _composed_once(
    folders: tuple[Path, ...], choices: tuple[Choice, ...], files: tuple[tuple[str, int, int], ...]
) -> bytes:
    """Compose the choices, and return the result as a pickle, from which copies can be loaded quickly.

    folders: the package's configs/ and, if it exists, the user's ./configs
    choices: a choice for each group that is not left at its default
    files: path, modification time and size of each file that Hydra may read. They are used only as a part of the
        cache's key, so that edited files are read again
    """
    store = _store_with_schema()
    for choice in choices:
        if choice.file:
            store.store(choice.name, choice.file.node, choice.group, choice.file.package)
    weights.register()
    configs, *extra_folders = folders
    if extra_folders:
        further = [f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in extra_folders)}]"]
    else:
        further = []
    try:
        with initialize_config_dir(str(configs), version_base=None):
            overrides = [f"{choice.group}={choice.name}" for choice in choices]
            composed = compose("config", [*further, *overrides], return_hydra_config=True)
    except (HydraException, yaml.YAMLError) as error:
        raise ConfigError([_not_composed(error, folders, choices)]) from error
    for folder in extra_folders:
        if problems := list(clashes(configs, folder, composed.hydra.runtime.choices)):
            raise ConfigError(problems)
    if composed.run.recipe is None:
        composed.run.recipe = composed.hydra.runtime.choices["recipe"].removeprefix(OF_PATH)
    with open_dict(composed):
        del composed["hydra"]
    return pickle.dumps(typed(composed))


@cache
def _store_with_schema() -> ConfigStore:
    """Add the schema to Hydra's store, and return the store. This takes 25 ms."""
    store = ConfigStore.instance()
    store.store("schema", ComposedConfig)
    return store


def _not_composed(error: Exception, folders: Sequence[Path], choices: Sequence[Choice]) -> Problem:
    """Translate Hydra's error to a problem that names the user's file."""
    message = "\n".join(line for line in str(error).splitlines() if "_type=" not in line)
    misplaced = "Key 'recipe' not in" in message or "@recipe." in message
    if misplaced and (lacking := without_package(folders)):
        names = ", ".join(str(path) for path in lacking)
        return Problem("recipe", "missing", f"needs a first line: write `# @package _global_` as line 1 of {names}")
    for choice in choices:
        if choice.file:
            message = message.replace(f"{choice.group}/{choice.name}", choice.file.path)
    if isinstance(error, MissingConfigException):
        return Problem("recipe", "unknown-name", message.splitlines()[0])
    return Problem("recipe", "malformed", f"can't be composed: {message}")
