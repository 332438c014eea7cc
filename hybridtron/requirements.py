"""Required packages of this project, and a check for missing packages.

    demand()           end the program if a package that training needs is missing
    demand("export")   end the program if a package that training or the extra `export` needs is missing

An extra is a named group of optional packages in pyproject.toml. In a checkout the requirements are read from
pyproject.toml, which may be newer than the metadata for an editable installation. If the package is installed without a
checkout, the requirements are read from the metadata that pip wrote. Packages are only searched for, not imported;
`hybridtron doctor` imports them and compares their versions. This module imports nothing but Python's standard library.
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
"""Maps each extra to its packages that pip must install without their dependencies, as {package: version range}.

mosaicml-streaming requires transformers < 5, numpy < 2.2 and torchvision, which conflict with this project's
requirements. The code of mosaicml-streaming that this project uses does not need them.
"""
COMPILED = {"te", "kernels"}
"""Extras with packages that pip compiles against the installed torch, so pip must not isolate the build from torch."""
# distribution -> module; left out are distributions whose module has the same name, except that - becomes _
MODULES = {
    "fla-core": "fla",
    "hydra-core": "hydra",
    "megatron-core": "megatron.core",
    "mlflow-skinny": "mlflow",
    "mosaicml-streaming": "streaming",
    "nvidia-dali-cuda130": "nvidia.dali",
    "pillow": "PIL",
    "python-snappy": "snappy",
}


@dataclass(frozen=True)
class Requirements:
    """Required distributions with tested version ranges: `{"torch": ">=2.11,<2.14"}`.

    python: the Python interpreter's version range
    required: distributions that training needs
    extras: extra -> {distribution: version range}, with the distributions in `ALONE`. If an extra refers to other
        extras, their distributions are not included
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
    """Return a distribution's version, or None if it is not installed. The distribution is not imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_checkout() -> bool:
    """Return True in a clone of the repository.

    The name in pyproject.toml is checked, because the file next to an installed package may be another project's.
    """
    return PROJECT.is_file() and f'name = "{NAME}"' in PROJECT.read_text(encoding="utf-8")


def _parted(texts: list[str]) -> dict[str, str]:
    """Parse requirements such as `torch>=2.11`; return version ranges by distribution.

    Requirements such as `hybridtron[plot]`, with which an extra refers to other extras of this package, are left out.
    """
    matches = [re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)", text) for text in texts]
    return {match[1]: match[2].strip() for match in matches if match and match[1] != NAME}


def is_there(distribution: str) -> bool:
    """Return True if a distribution's module can be found. The module is not imported."""
    module = MODULES.get(distribution, distribution.replace("-", "_"))
    try:
        return sys.modules.get(module) is not None or find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def missing(*extras: str) -> str | None:
    """Return a message with the missing packages for training and for these extras, or None if no package is missing.

    The message ends with a command to install the packages.
    """
    needs = requirements()
    names = dict.fromkeys([*needs.required, *(name for extra in extras for name in needs.extras[extra])])
    absent = [name for name in names if not is_there(name)]
    if not absent:
        return None
    verb = "is" if len(absent) == 1 else "are"
    return f"{', '.join(absent)} {verb} not installed: {install_command(absent, extras)}"


def install_command(absent: Iterable[str], extras: Iterable[str]) -> str:
    """Return a shell command that installs the absent distributions of these extras."""
    alone = {name: version for of_extra in ALONE.values() for name, version in of_extra.items() if name in absent}
    chosen = f"[{','.join(extras)}]" if extras else ""
    if is_checkout():
        project = f'--editable ".{chosen}"'
    else:
        project = f'"{NAME}{chosen}"'
    options = "--no-build-isolation " if COMPILED & set(extras) else ""
    if set(absent) - alone.keys():
        commands = [f"pip install {options}{project}"]
    else:
        commands = []
    return " && ".join(commands + [f'pip install --no-deps "{name}{version}"' for name, version in alone.items()])


def demand(*extras: str) -> None:
    """End the program with exit code 2 and a line on stderr if a package for training or these extras is missing."""
    if (fault := missing(*extras)) is not None:
        print(fault, file=sys.stderr)
        sys.exit(2)


def hide_known_warnings() -> None:
    """Hide warnings that would appear at the start of every command.

    - megatron-core warns that Transformer Engine and Apex are missing, and torch warns of renamed functions.
    - A CUDA build of torch warns on a machine without a GPU, when megatron-core imports torch.utils.cpp_extension.

    A run's first output already reports missing packages and the device. Only programs and their worker processes call
    this function, because importing the package must not change the importer's warning filters.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_of_a_missing_gpu)


def _is_not_of_a_missing_gpu(record: logging.LogRecord) -> bool:
    """Return True for every log record except the warning that there is no CUDA runtime."""
    return "No CUDA runtime is found" not in record.getMessage()
