"""The user's own configuration files, in addition to the package's files.

A group is a subfolder of the package's configs/, such as recipe/, cluster/ or data/. An argument chooses a file of a
group by its name: `recipe=laptop`. Users can choose their own files in two ways:

- by a path: `recipe=./mine.yaml`
- by a name: `recipe=mine` chooses the file configs/recipe/mine.yaml in the current folder, and likewise in other groups

If the package and the user have different files for the same name, a run can't use this name. Nothing here needs torch.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridtron.problems import ConfigError, Problem, did_you_mean
from hybridtron.resources import shipped
from hybridtron.safe_open import read_regular

OWN = Path("configs")  # the user's folder of configuration files, in the current folder
COMPLETE = "complete.txt"
"""File that marks a copy of the package's configs/ into which `copy_into` has added the user's files.

Jobs on a cluster use such a copy, and do not read ./configs.
"""

MAX_YAML_BYTES = 2**20  # maximum size of a user's file
NEAREST = 5  # maximum number of names in a suggestion
OF_PATH = "path-"  # prefix of a choice's name if the argument was a path: a copy of configs/ may have an equal name
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class OutsideFile:
    """A user's file that an argument names by its path.

    group: the group that the argument sets
    path: the path as written in the argument
    text: the file's content
    """

    group: str
    path: str
    text: str

    @property
    def name(self) -> str:
        """Name for the file in a copy of configs/; it contains a hash of the content."""
        stem = re.sub(r"[^A-Za-z0-9_]+", "-", Path(self.path).stem)
        return f"{stem}-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    @property
    def node(self) -> Any:
        """The keys in the file itself, without the keys of files in its `defaults` list."""
        return OmegaConf.load(StringIO(self.text))

    @property
    def package(self) -> str:
        """Section of the configuration to which the file's keys belong: SECTION in its line `# @package SECTION`.

        Without such a line, a recipe's keys are top-level keys (`_global_`), and the keys of a file in any other group
        belong to the section with the group's name.
        """
        package = _PACKAGE.search(self.text)
        if package:
            return package[1]
        if self.group == "recipe":
            return "_global_"
        return self.group


def own_folder(configs: Path) -> Path | None:
    """Return the user's folder ./configs, or None if it is not read.

    The result is None in three cases:

    - `configs` is not the package's own configs/; ./configs is read only in addition to that folder
    - `configs` contains the file COMPLETE
    - ./configs does not exist, or is the package's configs/ itself
    """
    folder = OWN.absolute()
    if (
        configs != shipped("configs")
        or (configs / COMPLETE).exists()
        or not folder.is_dir()
        or folder.samefile(configs)
    ):
        return None
    return folder


def groups_of(configs: Path) -> list[str]:
    """Return the names of the package's groups: recipe, cluster, data, ..."""
    return sorted(path.name for path in configs.iterdir() if path.is_dir())


def files_of(folder: Path, group: str) -> list[str]:
    """List the names for which a group has a file in this folder."""
    paths = (path for path in (folder / group).rglob("*.yaml") if path.is_file())
    return sorted(path.relative_to(folder / group).with_suffix("").as_posix() for path in paths)


def is_path(name: str) -> bool:
    """Return True if the value of a group is a path such as `./mine.yaml`, and False if it is a name."""
    return name.endswith((".yaml", ".yml")) or name.startswith(("./", "../", "/", "~"))


def is_file(path: str) -> bool:
    """Return True if a path is an existing file; False also if the operating system rejects the path."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class Choice:
    """The file chosen for a group: a name, and the content of the user's file if the argument was a path."""

    group: str
    name: str
    file: OutsideFile | None = None


def chosen(group: str, value: str, names: Sequence[str]) -> Choice:
    """Resolve the argument `group=value` to a choice. `names` are the group's known names.

    Raises ConfigError with a suggestion if `value` is neither a known name nor an existing file.
    """
    if value in names:
        return Choice(group, value)
    if not is_path(value):
        raise ConfigError([unknown_name(group, value, names)])
    file = outside_file(group, value, names)
    return Choice(group, f"{OF_PATH}{file.name}", file)


def quoted(text: str) -> str:
    """Quote a text for Hydra's grammar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def outside_file(group: str, path: str, names: Collection[str]) -> OutsideFile:
    """Read a user's file for a group. Raises ConfigError if the file is missing, unreadable or empty.

    `names` are the group's known names, for suggestions.
    """
    try:
        text = read_regular(Path(path).expanduser(), MAX_YAML_BYTES).decode()
        file = OutsideFile("recipe" if group == "model" else group, path, text)
        keys = file.node
    except (FileNotFoundError, NotADirectoryError):
        if is_file(f"{path}.yaml"):
            near = f"{path}.yaml"
        else:
            near = Path(path).stem
        hint = did_you_mean(near, [near] if near != Path(path).stem else names)
        raise ConfigError([Problem(group, "no-file", f"is {path}, but this file does not exist{hint}")]) from None
    except (OSError, ValueError, RuntimeError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError([Problem(group, "unreadable", f"is {path}, which can't be read: {error}")]) from error
    if not isinstance(keys, DictConfig) or not keys:
        raise ConfigError(
            [Problem(group, "missing", f"is {path}, which has no keys: add keys such as `model:` or `run:`")]
        )
    if _is_stored(Path(path).expanduser()) and "hooks" in (keys.get("run") or ()):
        keys.run.pop("hooks")
        file = replace(file, text=OmegaConf.to_yaml(keys))
    return file


def _is_stored(path: Path) -> bool:
    """Return True if a file is in a run's folder or in a checkpoint.

    Such a file may have been downloaded. Its hooks are ignored, since they could run any code.
    """
    return (path.parent / "manifest.json").exists() or (path.parent / "checkpoints").exists()


def unknown_name(group: str, name: str, names: Sequence[str]) -> Problem:
    """Return the problem for a name that a group does not have. The message lists similar names."""
    nearest = difflib.get_close_matches(name, names, NEAREST, cutoff=0)
    if len(names) <= NEAREST:
        hint = f"use {', '.join(names)}"
    else:
        hint = f"similar names are {', '.join(nearest)}"
    path = next((path for path in (f"./{name}", f"./{name}.yaml") if is_file(path)), "./NAME.yaml")
    meant = did_you_mean(name, names)
    return Problem(group, "unknown-name", f"has no {name!r}{meant}; {hint}; or name your own file: {group}={path}")


def clashes(configs: Path, own: Path, choices: Mapping[str, str]) -> Iterator[Problem]:
    """Report names for which the package and the user have different files, if the run may use such a name.

    choices: group -> name that the run uses

    If the run uses a file that only the user has, all ambiguous names are reported, since that file may include any
    other file. Else only ambiguous names in `choices` are reported.
    """
    ambiguous = {
        (group, name)
        for group in groups_of(configs)
        for name in files_of(own, group)
        if (shipped := configs / group / f"{name}.yaml").is_file()
        and shipped.read_bytes() != (own / group / f"{name}.yaml").read_bytes()
    }
    uses_own_file = any(_is_there(own, *pair) and not _is_there(configs, *pair) for pair in choices.items())
    for group, name in sorted(ambiguous if uses_own_file else ambiguous & set(choices.items())):
        file = OWN / group / f"{name}.yaml"
        yield Problem(
            group, "duplicate", f"has two different files for {name!r}, {file} and a file of hybridtron: rename {file}"
        )


def _is_there(folder: Path, group: str, name: str) -> bool:
    """Return True if a folder has a file for this name of a group."""
    return (folder / group / f"{name}.yaml").is_file()


def without_package(folders: Collection[Path]) -> list[Path]:
    """Return the recipes without a line `# @package _global_`, which every recipe needs."""
    recipes = (folder / "recipe" / f"{name}.yaml" for folder in folders for name in files_of(folder, "recipe"))
    return [recipe for recipe in recipes if not _PACKAGE.search(recipe.read_text(errors="replace"))]


def copy_into(configs: Path, own: Path | None, files: Collection[OutsideFile]) -> None:
    """Add the user's files and the file COMPLETE to a copy of the package's configs/.

    configs: the copy
    own: the user's folder ./configs, or None
    files: the files that arguments name by their paths
    """
    if own is not None:
        _copy_own(configs, own)
    for file in files:
        head = "" if _PACKAGE.search(file.text) else f"# @package {file.package}\n"
        (configs / file.group / f"{file.name}.yaml").write_text(head + file.text)
    lines = [f"{file.group}={file.name}: {Path(file.path).absolute()}" for file in files]
    (configs / COMPLETE).write_text("\n".join(["The package's files and the user's.", *lines, ""]))


def _copy_own(configs: Path, own: Path) -> None:
    """Copy the user's files, unless the copy already has a file with the same name in the group."""
    for group in groups_of(configs):
        for name in files_of(own, group):
            target = configs / group / f"{name}.yaml"
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((own / group / f"{name}.yaml").read_bytes())
