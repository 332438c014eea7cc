"""Compose configuration groups with Hydra: the package's groups and the user's own.

Nothing here needs torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict

from hybridtron.config import weights
from hybridtron.config.nulls import ComposedConfig, typed
from hybridtron.config.outside import Choice, clashes, groups_of, own_folder, quoted, without_package
from hybridtron.config.schema import ModelConfig
from hybridtron.problems import ConfigError, Problem


def model_of(configs: Path, choice: Choice) -> DictConfig:
    """Return a model by its file in configs/model, or else the model of the recipe with that name."""
    for folder in (configs, own_folder(configs)):
        if folder is not None and (file := folder / "model" / f"{choice.name}.yaml").is_file():
            model = OmegaConf.structured(ModelConfig)
            model.merge_with(OmegaConf.load(file))
            return model
    return composed_of(configs, [replace(choice, group="recipe")]).model


def composed_of(configs: Path, choices: Sequence[Choice]) -> DictConfig:
    """Compose the chosen groups and return a copy that the caller may change.

    Hydra takes 0.15 s, and sweeps and suites ask for the same composition many times, so the result is cached.
    """
    folders = [configs.absolute(), *([extra] if (extra := own_folder(configs)) else [])]
    paths = (path for folder in folders for group in groups_of(configs) for path in (folder / group).rglob("*.yaml"))
    files = sorted((str(p), (stat := p.stat()).st_mtime_ns, stat.st_size) for p in [configs / "config.yaml", *paths])
    return pickle.loads(_composed_once(tuple(folders), tuple(choices), tuple(files)))


@lru_cache(maxsize=256)
def _composed_once(
    folders: tuple[Path, ...], choices: tuple[Choice, ...], files: tuple[tuple[str, int, int], ...]
) -> bytes:
    """Compose the choices and return the result pickled, since a pickle is the quickest to copy.

    `files` are the path, modification time and size for each file that Hydra may read. They are part of the cache's
    key, so that an edited file is read again.
    """
    store = ConfigStore.instance()
    store.store("schema", ComposedConfig)
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
    with open_dict(composed):
        del composed["hydra"]
    return pickle.dumps(typed(composed))


def _not_composed(error: Exception, folders: Sequence[Path], choices: Sequence[Choice]) -> Problem:
    """Translate Hydra's error into a problem that names the user's file."""
    message = "\n".join(line for line in str(error).splitlines() if "_type=" not in line)
    misplaced = "Key 'recipe' not in" in message or "@recipe." in message
    if misplaced and (lacking := without_package(folders)):
        names = ", ".join(str(path) for path in lacking)
        return Problem("recipe", "missing", f"lacks its first line: write `# @package _global_` as line 1 of {names}")
    for choice in choices:
        if choice.file:
            message = message.replace(f"{choice.group}/{choice.name}", choice.file.path)
    if isinstance(error, MissingConfigException):
        return Problem("recipe", "unknown-name", message.splitlines()[0])
    return Problem("recipe", "malformed", f"does not compose: {message}")
