"""Read the configuration that a run wrote beside its checkpoints, and find secrets before they are written there.

Such a file is complete, with no interpolation left to resolve. A file with a `${...}` was not written by a run, and
resolving it could read environment variables when a user opens a downloaded checkpoint; so it is refused. Keys that
name code to run (`NAMES_CODE`) are left out for the same reason.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridtron.config.schema import Config
from hybridtron.problems import ConfigError, Problem
from hybridtron.regular_files import read_regular

GREATEST = 2**24  # bytes; a larger file is refused
SECRET = re.compile(
    r"secret|passw|passphrase|token(?!iz)|cred(s|ential)|(api|access|private)key"
    r"|(^|_)(key|keys|pat|auth|sas)(_|$)|_pwd(_|$)",  # PWD alone is the working folder
    re.IGNORECASE,
)
WITH_PASSWORD = re.compile(r"://(?:[^/@\s]+@|[^/@\s:]*:(?!\d+(?:/|$))[^@\s]*@)")  # a password may have a slash
LEAVE_IT = "which would be written to config.yaml in clear: leave it in the environment, where its library reads it"
DROPPED = {"parallel": ("expert",)}  # former keys, whose value had to be 1
NAMES_CODE = {"run": ("hooks",)}  # keys that only the configuration of a training may set, since they name code
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]*)")


def read_saved(path: Path) -> DictConfig:
    """Read a saved configuration over the schema's defaults. Raises ConfigError with the file and the fault."""
    try:
        values = _without_unread(OmegaConf.load(StringIO(read_regular(path, GREATEST).decode())))
        faults = [
            Problem(f"{path}: {key}", "unreadable", f"holds {text!r}, which no run writes")
            for key, text in references(values)
        ]
        merged = OmegaConf.unsafe_merge(pickle.loads(_defaults()), values)  # may reuse nodes: no one else holds these
    except OmegaConfBaseException as error:
        if error.full_key:
            where = f"{path}: {error.full_key}"
        else:
            where = str(path)
        raise ConfigError([Problem(where, "unreadable", str(error).splitlines()[0])]) from error
    except (YAMLError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError([Problem(str(path), "unreadable", f"can't be read: {str(error).splitlines()[0]}")]) from error
    if faults:
        raise ConfigError(faults)
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _defaults() -> bytes:
    """Return the schema's defaults, pickled: they are slow to make, and quick to copy this way."""
    return pickle.dumps(OmegaConf.structured(Config))


def secrets_from_environment(config: DictConfig) -> list[Problem]:
    """Report values that read a secret by `${oc.env:NAME}`: config.yaml and checkpoints would hold it resolved."""
    return [
        Problem(key, "secret", f"takes {name} from the environment, {LEAVE_IT}")
        for key, text in references(config)
        for name in _ENVIRONMENT.findall(text)
        if SECRET.search(name)
    ]


def spelled_secrets(values: Any, key: str = "") -> Iterator[Problem]:
    """Report URLs with a user name or password, and environment variables whose names suggest secrets."""
    if isinstance(values, dict | list):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from spelled_secrets(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, str) and WITH_PASSWORD.search(values):
        yield Problem(key, "secret", f"holds a password, {LEAVE_IT}")
    elif key.startswith("cluster.environment.") and SECRET.search(key.rpartition(".")[2]):
        cure = "leave it out; sbatch hands on the environment that you submit from"
        yield Problem(key, "secret", f"looks like a secret, which would be written down: {cure}")


def _without_unread(values: Any) -> Any:
    """Remove the keys in NAMES_CODE and DROPPED."""
    if not isinstance(values, DictConfig):
        return values
    for section, names in NAMES_CODE.items():
        node = values.get(section)
        for name in names:
            if isinstance(node, DictConfig):
                node.pop(name, None)
    for section, names in DROPPED.items():
        node = values.get(section)
        for name in names:
            if isinstance(node, DictConfig) and node.get(name) == 1:
                del node[name]
    return values


def references(config: Any) -> Iterator[tuple[str, str]]:
    """Yield every key that holds a `${...}`, with its text."""
    for key, parent, name in leaves(config):
        if OmegaConf.is_interpolation(parent, name):
            yield key, str(parent._get_node(name)._value())


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield every key that holds no further keys, with its section and its name there."""
    if node._is_none() or node._is_missing():
        return
    for name in range(len(node)) if isinstance(node, ListConfig) else node.keys():
        child = node._get_node(name)
        is_section = isinstance(child, DictConfig | ListConfig) and not child._is_none() and not child._is_missing()
        if is_section and not child._is_interpolation():
            yield from leaves(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", node, name
