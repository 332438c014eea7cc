"""Convert Hydra's result to the schema `Config`, with special treatment of `mixture: null`.

In the schema, null for a key of a phase means that the phase does not override the run's value. A config.yaml that a
run has written contains many such nulls, and can be used as a recipe. But users write `mixture: null` into a phase or
into `data` in order to remove a mixture. The functions here replace a user's `mixture: null` by an empty mixture. This
must happen before Hydra's result is merged into the schema, since after that a null can't be distinguished from a
missing key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridtron.config.schema import Config
from hybridtron.config.suggestions import unresolved
from hybridtron.problems import ConfigError

MIXTURE = "mixture"
# keys of a phase's section `data`; a section with all these keys was written by a run, so its nulls mean no override
WRITTEN = {"source", "path", MIXTURE, "documents", "order", "epochs"}


@dataclass
class ComposedConfig(Config):
    """The schema into which Hydra merges recipes. Sections with a mixture accept any value, so that nulls are kept."""

    data: Any = MISSING
    phases: Any = MISSING


def typed(composed: DictConfig) -> DictConfig:
    """Convert a composed configuration to the schema. Raises ConfigError for unknown keys and wrong types."""
    plain: Any = OmegaConf.to_container(composed)
    if isinstance(data := plain["data"], dict) and data.get(MIXTURE, {}) is None:
        data[MIXTURE] = {}
    plain["phases"] = without_null_mixtures(plain["phases"])
    try:
        merged = OmegaConf.unsafe_merge(OmegaConf.structured(Config), plain)  # copies neither argument
    except OmegaConfBaseException as error:
        raise ConfigError([unresolved(error)]) from error
    assert isinstance(merged, DictConfig)
    OmegaConf.set_struct(merged, True)
    return merged


def without_null_mixtures(value: Any) -> Any:
    """Replace each null mixture in a value by an empty mixture, which selects all sources of `data.path`."""
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
    """Remove all sources from each mixture in `config` that the new `value` for `key` sets to null.

    If `value` were only merged into `config`, the sources would remain.
    """
    for name, entry in value.items() if isinstance(value, dict) else ():
        if name == MIXTURE and entry is None:
            OmegaConf.update(config, f"{key}.{MIXTURE}", {}, merge=False)
        remove_null_mixtures(config, f"{key}.{name}", entry)
