"""Required packages of this project, and a check which of them are missing.

    demand()           at the start of a program: the packages that training needs
    demand("export")   before an extra is used

A checkout reads pyproject.toml, which may be newer than the metadata of an editable installation. An installed package
reads the metadata that pip wrote, since wheels have no pyproject.toml. Packages are only looked for, not imported;
`hybridtron doctor` tries them and compares versions. This module needs only Python.
"""

from __future__ import annotations

import importlib.metadata
import logging
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
"""Packages of an extra that pip must install without their dependencies: those pin versions (transformers < 5,
numpy < 2.2, torchvision) that conflict with ours, and the parts that we use don't need them."""
MODULES = {
    "fla-core": "fla",
    "hydra-core": "hydra",
    "megatron-core": "megatron.core",
    "mosaicml-streaming": "streaming",
    "pillow": "PIL",
    "python-snappy": "snappy",
}  # modules of distributions, if the names differ in more than a dash


@dataclass(frozen=True)
class Requirements:
    """Required distributions with the version ranges that were tried: `{"torch": ">=2.11,<2.14"}`.

    python: version range of the interpreter
    required: distributions that training needs
    extras: distributions by extra; references to other extras are left out, and those of `ALONE` are included
    """

    python: str
    required: dict[str, str]
    extras: dict[str, dict[str, str]]


def requirements() -> Requirements:
    """Read the requirements from pyproject.toml in a checkout, else from the installed package's metadata."""
    if is_checkout():
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        texts = {"": project["dependencies"], **project["optional-dependencies"]}
        python = project["requires-python"]
    else:
        about = importlib.metadata.metadata(NAME)
        texts = {extra: [] for extra in ("", *(about.get_all("Provides-Extra") or ()))}
        for text in about.get_all("Requires-Dist") or ():
            marker = re.search(r"extra == ['\"]([\w-]+)['\"]", text)
            texts[marker[1] if marker else ""].append(text)
        python = about["Requires-Python"]
    extras = {extra: _parted(of_extra) | ALONE.get(extra, {}) for extra, of_extra in texts.items() if extra}
    return Requirements(python, _parted(texts[""]), extras)


def installed(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed. It is not imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_checkout() -> bool:
    """Return True in a clone of the repository. The name is checked, as others may put a pyproject.toml there."""
    return PROJECT.is_file() and f'name = "{NAME}"' in PROJECT.read_text(encoding="utf-8")


def _parted(texts: list[str]) -> dict[str, str]:
    """Split requirements such as `torch>=2.11` into name and version range, without references to this package."""
    matches = [re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)", text) for text in texts]
    return {match[1]: match[2].strip() for match in matches if match and match[1] != NAME}


def is_there(distribution: str) -> bool:
    """Return True if a distribution's module can be found. It is not imported."""
    module = MODULES.get(distribution, distribution.replace("-", "_"))
    try:
        return sys.modules.get(module) is not None or find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def missing(*extras: str) -> str | None:
    """Name the packages missing for training and these extras, and a command to install them. None if all exist."""
    wanted = requirements()
    names = dict.fromkeys([*wanted.required, *(name for extra in extras for name in wanted.extras[extra])])
    absent = [name for name in names if not is_there(name)]
    if not absent:
        return None
    verb = "is" if len(absent) == 1 else "are"
    return f"{', '.join(absent)} {verb} not installed: {install_command(absent, extras)}"


def install_command(absent: Iterable[str], extras: Iterable[str]) -> str:
    """Return a shell command to install absent distributions; `extras` are the extras to install them by."""
    alone = {name: version for of_extra in ALONE.values() for name, version in of_extra.items() if name in absent}
    chosen = f"[{','.join(extras)}]" if extras else ""
    if is_checkout():
        project = f'--editable ".{chosen}"'
    else:
        project = f'"{NAME}{chosen}"'
    if set(absent) - alone.keys():
        commands = [f"pip install {project}"]
    else:
        commands = []
    return " && ".join(commands + [f'pip install --no-deps "{name}{version}"' for name, version in alone.items()])


def demand(*extras: str) -> None:
    """End the program with exit code 2 and a line on stderr if a package for training or these extras is missing."""
    if (fault := missing(*extras)) is not None:
        print(fault, file=sys.stderr)
        sys.exit(2)


def hide_known_warnings() -> None:
    """Hide megatron-core's warnings that Transformer Engine and Apex are missing, and torch's on renamed functions.

    Hide also the warning of a CUDA build of torch that there is no GPU: megatron-core imports torch's builder of
    extensions, which writes it at the start of every command.

    The table at the start of a run reports missing packages and the device. Only programs and their worker processes
    call this: importing the package must not change the importer's warning filters.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_of_a_missing_gpu)


def _is_not_of_a_missing_gpu(record: logging.LogRecord) -> bool:
    """Let every log record pass but the one that there is no CUDA runtime."""
    return "No CUDA runtime is found" not in record.getMessage()
