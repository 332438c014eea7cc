"""Read the config.yaml that a run has written, and find secrets before a run writes them.

config.yaml files may be downloaded together with a checkpoint, so they are not trusted:

- A file with an interpolation (`${...}`) is refused. Runs write only resolved values, and an interpolation could read
  environment variables.
- Keys that name code to run (`NAMES_CODE`) are ignored.
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
from hybridtron.nested import NotParsed, yaml_of
from hybridtron.problems import ConfigError, Problem
from hybridtron.safe_open import read_regular

MAX_CONFIG_BYTES = 2**24  # maximum size of a config.yaml
SECRET = re.compile(  # names of environment variables that probably contain secrets
    r"secret|passw|passphrase|token(?!iz)|cred(s|ential)|(api|access|private)key"
    r"|(^|_)(key|keys|pat|auth|sas)(_|$)|_pwd(_|$)",  # the variable PWD is the working folder
    re.IGNORECASE,
)
# user:password@ in a URL; passwords may contain a slash
WITH_PASSWORD = re.compile(r"://(?:[^/@\s]+@|[^/@\s:]*:(?!\d+(?:/|$))[^@\s]*@)")
LEAVE_IT = "which a run would write to config.yaml: remove the secret, and set the environment variable of its library"
NAMES_CODE = {"run": ("hooks",)}  # section -> keys that name code to run
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]*)")


def named_start(run_dir: Path) -> str | None:
    """Return the path in `run.resume` of the last start in a run's folder, or None if it named no path.

    Every start writes config.yaml into the folder. Without a readable config.yaml, nothing was trained yet.
    """
    try:
        resume = yaml_of(read_regular(run_dir / "config.yaml", MAX_CONFIG_BYTES))["run"]["resume"]
    except (OSError, NotParsed, KeyError, TypeError):
        return None
    if resume in ("auto", "never"):
        return None
    return resume


def read_saved(path: Path) -> DictConfig:
    """Read a saved configuration. Keys that are not in the file get their defaults.

    Raises ConfigError if the file can't be read or was not written by a run. The error names the file.
    """
    try:
        values = _without_unread(OmegaConf.load(StringIO(read_regular(path, MAX_CONFIG_BYTES).decode())))
        faults = [
            Problem(f"{path}: {key}", "unreadable", f"is {text!r}, but files that runs write have no interpolations")
            for key, text in references(values)
        ]
        # unsafe_merge may reuse its arguments' nodes; nothing else uses these nodes
        merged = OmegaConf.unsafe_merge(pickle.loads(_defaults()), values)
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
    """Return the schema's defaults as a pickle. Loading the pickle is faster than building the defaults."""
    return pickle.dumps(OmegaConf.structured(Config))


def secrets_from_environment(config: DictConfig) -> list[Problem]:
    """Report values that read a secret with `${oc.env:NAME}`, since a run would write the secret into config.yaml."""
    return [
        Problem(key, "secret", f"takes {name} from the environment, {LEAVE_IT}")
        for key, text in references(config)
        for name in _ENVIRONMENT.findall(text)
        if SECRET.search(name)
    ]


def spelled_secrets(values: Any, key: str = "") -> Iterator[Problem]:
    """Report URLs with a user name or password, and secrets in `cluster.environment`.

    values: nested dictionaries and lists of the configuration
    key: dotted key of `values`
    """
    if isinstance(values, dict | list):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from spelled_secrets(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, str) and WITH_PASSWORD.search(values):
        yield Problem(key, "secret", f"contains a password, {LEAVE_IT}")
    elif key.startswith("cluster.environment.") and SECRET.search(key.rpartition(".")[2]):
        cure = "leave the key out; sbatch passes the environment of `hybridtron submit` to the job"
        yield Problem(key, "secret", f"looks like a secret, which a run would write to config.yaml: {cure}")


def _without_unread(values: Any) -> Any:
    """Remove the keys in NAMES_CODE."""
    if not isinstance(values, DictConfig):
        return values
    for section, names in NAMES_CODE.items():
        node = values.get(section)
        for name in names:
            if isinstance(node, DictConfig):
                node.pop(name, None)
    return values


def references(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for every value that is an interpolation, a text with `${...}`."""
    for key, parent, name in leaves(config):
        if OmegaConf.is_interpolation(parent, name):
            yield key, str(parent._get_node(name)._value())


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, parent section, name in the section) for every value that is not a section.

    A list is treated as a section; the names in it are its indices.
    """
    if node._is_none() or node._is_missing():
        return
    for name in range(len(node)) if isinstance(node, ListConfig) else node.keys():
        child = node._get_node(name)
        is_section = isinstance(child, DictConfig | ListConfig) and not child._is_none() and not child._is_missing()
        if is_section and not child._is_interpolation():
            yield from leaves(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", node, name
