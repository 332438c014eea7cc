"""What pyproject.toml asks for, and what of it can't be found. Needs nothing but Python, and imports nothing.

    demand()           at the head of a program: what every command needs
    demand("export")   before an extra is used

Whether what is there works, and in which version, is for hybridtron doctor to say.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
MODULES = {
    "hydra-core": "hydra",
    "megatron-core": "megatron.core",
    "mosaicml-streaming": "streaming",
    "pillow": "PIL",
    "python-snappy": "snappy",
}  # where module and distribution differ in more than a dash


@dataclass(frozen=True)
class Requirements:
    """Distributions and the versions of them that were tried: `{"torch": ">=2.11,<2.14"}`.

    python: the versions of the interpreter
    declared, alone: what training needs; `alone` is installed without its own dependencies
    extras: by the extra's name, without what an extra takes from others
    """

    python: str
    declared: dict[str, str]
    alone: dict[str, str]
    extras: dict[str, dict[str, str]]

    @property
    def required(self) -> dict[str, str]:
        return self.declared | self.alone


def requirements() -> Requirements:
    """What the project's file says."""
    told = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    project = told["project"]
    extras = {name: _parted(texts, project["name"]) for name, texts in project["optional-dependencies"].items()}
    alone = told["dependency-groups"]["without-dependencies"]
    return Requirements(project["requires-python"], _parted(project["dependencies"]), _parted(alone), extras)


def _parted(texts: list[str], itself: str = "") -> dict[str, str]:
    matches = [re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)", text) for text in texts]
    return {match[1]: match[2].strip() for match in matches if match and match[1] != itself}


def is_there(distribution: str) -> bool:
    """Whether its module can be found; it is not imported."""
    module = MODULES.get(distribution, distribution.replace("-", "_"))
    try:
        return sys.modules.get(module) is not None or find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above
        return False


def missing(*extras: str) -> str | None:
    """What can't be found of what training and these extras need, and the command that installs it, on one line."""
    wanted = requirements()
    declared = dict.fromkeys([*wanted.declared, *(name for extra in extras for name in wanted.extras[extra])])
    usual = [name for name in declared if not is_there(name)]
    alone = [name for name in wanted.alone if not is_there(name)]
    project = f'".[{",".join(extras)}]"' if extras else "."
    commands = [f"pip install --editable {project}"] if usual else []
    commands += [f'pip install --no-deps "{name}{wanted.alone[name]}"' for name in alone]
    names = usual + alone
    if not names:
        return None
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed: {' && '.join(commands)}"


def demand(*extras: str) -> None:
    """End the program with exit code 2, and say so on one line, where something is missing."""
    if (fault := missing(*extras)) is not None:
        print(fault, file=sys.stderr)
        sys.exit(2)
