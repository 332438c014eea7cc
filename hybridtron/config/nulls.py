"""Convert Hydra's result to the schema, while a recipe's `null` can still be distinguished from a missing key.

In the schema, a null in a phase means that the run's own value holds. Configurations that runs have written use null
this way: they list every key, and can serve as recipes. A user who writes `mixture: null` into a phase or under `data`
wants no mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridtron.config.mistakes import unresolved
from hybridtron.config.schema import Config
from hybridtron.problems import ConfigError

MIXTURE = "mixture"
# keys of a phase's data; a dictionary that has all of them was written by a run, where null means no override
WRITTEN = {"source", "path", MIXTURE, "documents", "order", "epochs"}


@dataclass
class ComposedConfig(Config):
    """The schema into which Hydra merges recipes; sections that have a mixture accept any content."""

    data: Any = MISSING
    phases: Any = MISSING


def typed(composed: DictConfig) -> DictConfig:
    """Convert a composed configuration to the schema. Raises ConfigError where it does not fit."""
    plain: Any = OmegaConf.to_container(composed)
    if isinstance(data := plain["data"], dict) and data.get(MIXTURE, {}) is None:
        data[MIXTURE] = {}
    plain["phases"] = without_null_mixtures(plain["phases"])
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), plain)
    except OmegaConfBaseException as error:
        raise ConfigError([unresolved(error)]) from error
    assert isinstance(merged, DictConfig)
    OmegaConf.set_struct(merged, True)
    return merged


def without_null_mixtures(value: Any) -> Any:
    """Replace each null mixture in a value by an empty one, which means every source of the path."""
    if isinstance(value, list):
        return [without_null_mixtures(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() >= WRITTEN:
        return value
    return {
        name: {} if (name, entry) == (MIXTURE, None) else without_null_mixtures(entry) for name, entry in value.items()
    }


def remove_null_mixtures(config: DictConfig, key: str, value: Any) -> None:
    """Remove the mixtures that a value for a key sets to null, before it is merged."""
    for name, entry in value.items() if isinstance(value, dict) else ():
        if name == MIXTURE and entry is None:
            OmegaConf.update(config, f"{key}.{MIXTURE}", {}, merge=False)
        remove_null_mixtures(config, f"{key}.{name}", entry)
