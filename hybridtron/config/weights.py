"""Resolve the values that a recipe takes from the checkpoint in `run.weights`, as interpolations in its YAML.

    ${weights:KEY}   model.*, precision.* and run.name of that checkpoint; phase.* and data.*: its last phase's
    ${steps:100}     the tokens in that number of steps, by the phase around it
    ${times:A,B}     their product
    ${ratio:A,B}     A / B

So a recipe that starts from any checkpoint lists only its changes. An imported checkpoint does not know how it was
trained: its configuration has no phases, and keys that would come from there must be set. Nothing here opens the
weights. RUN@best names a run's checkpoint with the lowest held-out loss.
"""

from __future__ import annotations

import dataclasses
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridtron.config.resolve import resolve
from hybridtron.config.saved import read_saved, references
from hybridtron.config.schema import Config
from hybridtron.limits import is_folder, shortened
from hybridtron.problems import ConfigError, Problem

KEY = "run.weights"
BEST = "@best"
WHAT = "a run's folder (runs/NAME) or one of its checkpoints (runs/NAME/checkpoints/step-00000100)"
_WEIGHTS = re.compile(r"\$\{weights:([\w.]+)\}")
FREE_FORM = (("model", "layers"), ("data", "mixture"))  # dictionaries whose entries a command line may change


def register() -> None:
    """Register the interpolations with OmegaConf."""
    for name, resolver in (("weights", _weights), ("steps", _steps), ("times", _times), ("ratio", _ratio)):
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def settle(config: DictConfig) -> None:
    """Check `run.weights`, and replace interpolated dictionaries by the checkpoint's, so that entries can be set.

    Raises ConfigError if the recipe needs a checkpoint and there is none.
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
    """Report a recipe that continues from trained weights but has none; it would train random ones silently."""
    run = config.run
    if run.tunes is None or run.weights is not None:
        return []
    needed = _needed(run.tunes)
    return [dataclasses.replace(needed, message=f"{needed.message}. run.tunes=null trains new weights in their place")]


def _needed(tunes: str | None) -> Problem:
    """Return the problem for a recipe that needs `run.weights`."""
    whose = "a checkpoint" if tunes is None else tunes
    cure = f"to {WHAT}; hybridtron import makes a checkpoint of a Hugging Face folder"
    return Problem(KEY, "missing", f"must be set, as the recipe starts from {whose}: {cure}")


def folder_of(named: str) -> str:
    """Return the folder that a key names, without @best: RUN for RUN@best."""
    return named.removesuffix(BEST)


def tokenizer_of(folder: str) -> Path | None:
    """Return a checkpoint's tokenizer.json, or that of a run's newest checkpoint; None if there is none."""
    path = Path(folder_of(folder))
    tokenizers = sorted(path.glob("checkpoints/step-*/tokenizer.json"), reverse=True) or [path / "tokenizer.json"]
    if tokenizers[0].is_file():
        return tokenizers[0]
    return None


def unknown(config: DictConfig) -> list[Problem]:
    """Report keys whose values the checkpoint would have to provide but does not know."""
    folder = config.run.weights
    if folder is None or (saved := _saved(folder)).keys() >= {"phase"}:
        return []
    problems = []
    for key, text in references(config):
        paths = [name.split(".") for name in _WEIGHTS.findall(text)]
        if any(name[0] not in saved or name[1] not in saved[name[0]] for name in paths):
            problems.append(
                Problem(key, "missing", f"must be set: {folder} was imported, and does not say how it was trained")
            )
    return problems


def _saved(folder: str) -> dict[str, Any]:
    """Return the sections that `${weights:KEY}` can name, from a run's or checkpoint's config.yaml.

    Raises ConfigError if there is no such file or it cannot be read.
    """
    path = Path(folder_of(folder)) / "config.yaml"
    if not (exists := is_folder(folder_of(folder))) or not path.is_file():
        if exists:
            why = f"has no config.yaml: name {WHAT}"
        else:
            why = f"is not there: name {WHAT}"
        raise ConfigError([Problem(KEY, "no-file", f"{shortened(folder)} {why}")])
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except ConfigError as error:
        raise ConfigError([Problem(KEY, p.code, f"{p.key} {p.message}") for p in error.problems]) from error


@lru_cache(maxsize=4)
def _parsed(path: Path, _modified: int) -> dict[str, Any]:
    """Parse a config.yaml to sections with plain values; cached until the file's modification time changes."""
    config = OmegaConf.to_object(read_saved(path))
    assert isinstance(config, Config)
    if not config.phases:  # an imported checkpoint: how it was trained is unknown
        known = {"model": config.model, "precision": config.precision, "run": config.run, "data": config.data}
        sections = {name: dataclasses.asdict(section) for name, section in known.items()}
        del sections["data"]["path"]
        return sections
    last = resolve(config)[-1]
    peak = next(phase.lr for phase in reversed(config.phases) if phase.lr is not None)  # of the schedule that it ends
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
    return float(f"{a * b:.12g}")  # 0.1 x 6e-4 is 6e-5, not 6.000000000000001e-05


def _ratio(a: float, b: float) -> float:
    return float(f"{a / b:.12g}")
