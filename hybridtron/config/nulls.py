"""What Hydra composes, made typed: here a `null` of a recipe is still there to be seen.

In the schema null says of a key of a phase that it is left as the run has it, and so do configurations that runs have
written, which name every key and can be a recipe. A person who writes `mixture: null` into a phase, or under `data`,
wants none.
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
# keys of a phase's data, all of which every run writes
WRITTEN = {"source", "path", MIXTURE, "documents", "order", "epochs"}


@dataclass
class ComposedConfig(Config):
    """The schema that Hydra merges recipes into: of the sections with a mixture it takes whatever they say."""

    data: Any = MISSING
    phases: Any = MISSING


def typed(composed: DictConfig) -> DictConfig:
    """What was composed, by the schema. ConfigError where it does not fit."""
    plain: Any = OmegaConf.to_container(composed)
    if isinstance(data := plain["data"], dict) and data.get(MIXTURE, {}) is None:
        data[MIXTURE] = {}
    plain["phases"] = without_null_mixtures(plain["phases"])
    try:
        made = OmegaConf.merge(OmegaConf.structured(Config), plain)
    except OmegaConfBaseException as error:
        raise ConfigError([unresolved(error)]) from error
    assert isinstance(made, DictConfig)
    OmegaConf.set_struct(made, True)
    return made


def without_null_mixtures(value: Any) -> Any:
    """A value of a configuration in which a mixture of null is an empty one: every source of the path."""
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
    """Take out the mixtures that a value below a key says to be null, before it is merged."""
    for name, entry in value.items() if isinstance(value, dict) else ():
        if name == MIXTURE and entry is None:
            OmegaConf.update(config, f"{key}.{MIXTURE}", {}, merge=False)
        remove_null_mixtures(config, f"{key}.{name}", entry)
