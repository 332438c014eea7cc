"""What this package asks for, and what of it can't be found. Needs nothing but Python, and imports nothing.

    demand()           at the head of a program: what every command needs
    demand("export")   before an extra is used

In a checkout pyproject.toml is asked, which an editable installation may be older than; in an installed package, whose
wheel has no such file, the metadata that pip wrote. Whether what is there works, and in which version, is for
`hybridtron doctor` to say.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

NAME = "hybridtron"
PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
ALONE = {"streaming": {"mosaicml-streaming": "==0.13.0"}}
"""What an extra stands for without naming it: pip would install the versions that it pins (transformers < 5,
numpy < 2.2, torchvision), which break what is installed and are not needed for what is used of it."""
MODULES = {
    "fla-core": "fla",
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
    required: what training needs
    extras: by the extra's name, without what an extra takes from others, and with what is installed alone
    """

    python: str
    required: dict[str, str]
    extras: dict[str, dict[str, str]]


def requirements() -> Requirements:
    """What the project's file says, or the metadata of the installed package."""
    if is_checkout():
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        texts = {"": project["dependencies"], **project["optional-dependencies"]}
        python = project["requires-python"]
    else:
        about = importlib.metadata.metadata(NAME)
        texts = {extra: [] for extra in ("", *(about.get_all("Provides-Extra") or ()))}
        for text in about.get_all("Requires-Dist") or ():
            found = re.search(r"extra == ['\"]([\w-]+)['\"]", text)
            texts[found[1] if found else ""].append(text)
        python = about["Requires-Python"]
    extras = {extra: _parted(of_extra) | ALONE.get(extra, {}) for extra, of_extra in texts.items() if extra}
    return Requirements(python, _parted(texts[""]), extras)


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_checkout() -> bool:
    """Whether this package stands in a clone of its repository: other packages may leave a pyproject.toml beside it."""
    return PROJECT.is_file() and f'name = "{NAME}"' in PROJECT.read_text(encoding="utf-8")


def _parted(texts: list[str]) -> dict[str, str]:
    matches = [re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)", text) for text in texts]
    return {match[1]: match[2].strip() for match in matches if match and match[1] != NAME}


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
    names = dict.fromkeys([*wanted.required, *(name for extra in extras for name in wanted.extras[extra])])
    absent = [name for name in names if not is_there(name)]
    if not absent:
        return None
    verb = "is" if len(absent) == 1 else "are"
    return f"{', '.join(absent)} {verb} not installed: {install_command(absent, extras)}"


def install_command(absent: Iterable[str], extras: Iterable[str]) -> str:
    """What installs these distributions, which training or these extras need."""
    alone = {name: version for of_extra in ALONE.values() for name, version in of_extra.items() if name in absent}
    chosen = f"[{','.join(extras)}]" if extras else ""
    project = f'--editable ".{chosen}"' if is_checkout() else f'"{NAME}{chosen}"'
    commands = [f"pip install {project}"] if set(absent) - alone.keys() else []
    return " && ".join(commands + [f'pip install --no-deps "{name}{version}"' for name, version in alone.items()])


def demand(*extras: str) -> None:
    """End the program with exit code 2, and say so on one line, where something is missing."""
    if (fault := missing(*extras)) is not None:
        print(fault, file=sys.stderr)
        sys.exit(2)


def hide_known_warnings() -> None:
    """Hide that megatron-core finds no Transformer Engine and no Apex, and what it uses of torch that is renamed.

    The start-up table reports the first. Only programs do so, and processes that they start: importing the package
    leaves the importer's filters as they are.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
