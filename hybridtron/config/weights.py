"""Resolve a recipe's interpolations that take values from the checkpoint in `run.weights`.

A recipe that starts from a checkpoint lists only its changes. For other keys, its YAML has these interpolations:

    ${weights:model.KEY}   a value from the section `model` of the checkpoint's configuration; likewise for the sections
                           `precision` and `run`
    ${weights:phase.KEY}   a value from the checkpoint's last phase
    ${weights:data.KEY}    a value from the section `data` of the checkpoint's last phase
    ${steps:100}           number of tokens in 100 steps of the phase that contains the interpolation
    ${times:A,B}           A * B
    ${ratio:A,B}           A / B

An imported checkpoint has no phases, since its model's training is unknown. The user must then set all keys that the
recipe takes from a phase. `RUN@best` stands for the checkpoint of the run `RUN` with the lowest held-out loss. This
module reads only configurations, not weights.
"""

from __future__ import annotations

import dataclasses
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridtron.config.resolve import RunPlan
from hybridtron.config.saved import read_saved, references
from hybridtron.config.schema import Config
from hybridtron.limits import is_folder, shortened
from hybridtron.problems import ConfigError, Problem

KEY = "run.weights"
BEST = "@best"
WHAT = "a run's folder (runs/NAME) or one of its checkpoints (runs/NAME/checkpoints/step-00000100)"
_WEIGHTS = re.compile(r"\$\{weights:([\w.]+)\}")
# (section, key) of dictionaries whose entries the command line may change
FREE_FORM = (
    ("model", "layers"),
    ("data", "mixture"),
)


def register() -> None:
    """Register the interpolations with OmegaConf."""
    for name, resolver in (("weights", _weights), ("steps", _steps), ("times", _times), ("ratio", _ratio)):
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def settle(config: DictConfig) -> None:
    """Check `run.weights`, and resolve interpolations that stand for a dictionary.

    The dictionaries are resolved before the command line changes their entries. Raises ConfigError if the recipe needs
    `run.weights` but it is not set, or if its value is neither a run nor a checkpoint.
    """
    if config.run.weights is None:
        if any("${weights:" in text for _, text in references(config)):
            raise ConfigError([_needed(config.run.tunes)])
        return
    saved = _saved(config.run.weights)
    for section, name in FREE_FORM:
        if OmegaConf.is_interpolation(config[section], name):
            config[section][name] = {}
            OmegaConf.update(config, f"{section}.{name}", saved[section][name], force_add=True)


def lacking_weights(config: Config) -> list[Problem]:
    """Return a problem if the recipe needs pretrained weights (`run.tunes`) and `run.weights` is not set.

    Without this check the run would silently train randomly initialized weights.
    """
    run = config.run
    if run.tunes is None or run.weights is not None:
        return []
    needed = _needed(run.tunes)
    return [dataclasses.replace(needed, message=f"{needed.message}; or train from random weights with run.tunes=null")]


def _needed(tunes: str | None) -> Problem:
    """Return the problem for a recipe that needs `run.weights`."""
    whose = "a checkpoint" if tunes is None else tunes
    cure = f"use {WHAT}; `hybridtron import` makes a checkpoint from a Hugging Face folder"
    return Problem(KEY, "missing", f"must be set, since the recipe starts from {whose}: {cure}")


def folder_of(named: str) -> str:
    """Return the folder in a value of `run.weights`, without @best: RUN for RUN@best."""
    return named.removesuffix(BEST)


def tokenizer_of(folder: str) -> Path | None:
    """Return the path of a checkpoint's tokenizer.json, or None if there is no such file.

    `folder` is a checkpoint or a run. For a run, the newest checkpoint with a tokenizer is used.
    """
    path = Path(folder_of(folder))
    tokenizers = sorted(path.glob("checkpoints/step-*/tokenizer.json"), reverse=True) or [path / "tokenizer.json"]
    if tokenizers[0].is_file():
        return tokenizers[0]
    return None


def unknown(config: DictConfig) -> list[Problem]:
    """Report keys that the recipe takes from a phase of the checkpoint, if the checkpoint has no phases."""
    folder = config.run.weights
    if folder is None or (saved := _saved(folder)).keys() >= {"phase"}:
        return []
    problems = []
    for key, text in references(config):
        paths = [name.split(".") for name in _WEIGHTS.findall(text)]
        if any(name[0] not in saved or name[1] not in saved[name[0]] for name in paths):
            problems.append(
                Problem(
                    key,
                    "missing",
                    f"must be set: {folder} is an imported checkpoint, which has no training configuration",
                )
            )
    return problems


def _saved(folder: str) -> dict[str, Any]:
    """Return the sections that `${weights:KEY}` can read, from the config.yaml of a run or checkpoint.

    Raises ConfigError if there is no such file or it cannot be read.
    """
    path = Path(folder_of(folder)) / "config.yaml"
    if not (exists := is_folder(folder_of(folder))) or not path.is_file():
        if exists:
            why = f"has no config.yaml: name {WHAT}"
        else:
            why = f"does not exist: name {WHAT}"
        raise ConfigError([Problem(KEY, "no-file", f"{shortened(folder)} {why}")])
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except ConfigError as error:
        raise ConfigError([Problem(KEY, p.code, f"{p.key} {p.message}") for p in error.problems]) from error


@lru_cache(maxsize=4)
def _parsed(path: Path, _modified: int) -> dict[str, Any]:
    """Return the sections in a config.yaml as dictionaries.

    `_modified` is the file's modification time. It is used only in the cache's key, so that a changed file is read
    again.
    """
    config = OmegaConf.to_object(read_saved(path))
    assert isinstance(config, Config)
    if not config.phases:  # an imported checkpoint
        known = {"model": config.model, "precision": config.precision, "run": config.run, "data": config.data}
        sections = {name: dataclasses.asdict(section) for name, section in known.items()}
        del sections["data"]["path"]
        return sections
    last = RunPlan.of(config).phases[-1]
    # only phases with lr_piece=rewarm have a peak rate `lr`
    peak = next(phase.lr for phase in reversed(config.phases) if phase.lr is not None)
    sections = {"model": last.model, "precision": last.precision, "run": config.run}
    sections |= {"phase": dataclasses.replace(last.settings, lr=peak), "data": last.data}
    return {name: dataclasses.asdict(section) for name, section in sections.items()}


def _weights(key: str, *, _root_: DictConfig) -> Any:
    value: Any = _saved(_root_.run.weights)
    for name in key.split("."):
        value = value[name]
    return value


def _steps(count: int, *, _parent_: DictConfig) -> str:
    return str(count * _parent_.seq_len * _parent_.global_batch)


def _times(a: float, b: float) -> float:
    return float(f"{a * b:.12g}")  # round: 0.1 * 6e-4 gives 6e-05, not 6.000000000000001e-05


def _ratio(a: float, b: float) -> float:
    return float(f"{a / b:.12g}")
