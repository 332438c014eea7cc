"""The user's own configuration files, beside those of the package.

`recipe=./mine.yaml` names a file by its path. `recipe=mine` can also be `configs/recipe/mine.yaml` in the current
folder: its subfolders recipe/, cluster/, data/ ... add names to these groups. If a name exists in both places with
different content, its use is refused. Nothing here needs torch.
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
from hybridtron.regular_files import read_regular
from hybridtron.shipped import shipped

OWN = Path("configs")
COMPLETE = "complete.txt"
"""Marks a copy of configs/ that includes the user's files, such as a job's code; no other folder is read then."""

GREATEST = 2**20  # bytes; a larger file is refused
NEAREST = 5
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class OutsideFile:
    """A file that an argument names by its path."""

    group: str
    path: str
    text: str

    @property
    def name(self) -> str:
        """Name in the group, unique for the file's content."""
        stem = re.sub(r"[^A-Za-z0-9_]+", "-", Path(self.path).stem)
        return f"{stem}-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    @property
    def node(self) -> Any:
        """The file's keys; the files that it builds on are not loaded yet."""
        return OmegaConf.load(StringIO(self.text))

    @property
    def package(self) -> str:
        """Section that the file's keys belong to: its `@package`, else everything for a recipe, else its group."""
        package = _PACKAGE.search(self.text)
        if package:
            return package[1]
        if self.group == "recipe":
            return "_global_"
        return self.group


def own_folder(configs: Path) -> Path | None:
    """Return the user's configs/ folder; None if there is none, it is the package's, or `configs` is complete."""
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
    """List the names of a group that have a file in this folder."""
    paths = (path for path in (folder / group).rglob("*.yaml") if path.is_file())
    return sorted(path.relative_to(folder / group).with_suffix("").as_posix() for path in paths)


def is_path(name: str) -> bool:
    """Check if a choice is a path such as `./mine.yaml`, not a name."""
    return name.endswith((".yaml", ".yml")) or name.startswith(("./", "../", "/", "~"))


def is_file(path: str) -> bool:
    """Check if a path is an existing file; False if the operating system rejects the path."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class Choice:
    """The choice for a group: a name, and the user's file if a path was given."""

    group: str
    name: str
    file: OutsideFile | None = None


def chosen(group: str, value: str, names: Sequence[str]) -> Choice:
    """Resolve `group=value` to a choice; `names` are the group's known names.

    Raises ConfigError with an alternative if there is no such name or file.
    """
    if value in names:
        return Choice(group, value)
    if not is_path(value):
        raise ConfigError([unknown_name(group, value, names)])
    file = outside_file(group, value, names)
    return Choice(group, f"path-{file.name}", file)  # the prefix, since a copy of configs/ may have this name already


def quoted(text: str) -> str:
    """Quote a text for Hydra's grammar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def outside_file(group: str, path: str, names: Collection[str]) -> OutsideFile:
    """Read the file at a path. Raises ConfigError if there is none or it holds no keys.

    `names` are the group's known names, for suggestions.
    """
    try:
        text = read_regular(Path(path).expanduser(), GREATEST).decode()
        file = OutsideFile("recipe" if group == "model" else group, path, text)
        keys = file.node
    except (FileNotFoundError, NotADirectoryError):
        if is_file(f"{path}.yaml"):
            near = f"{path}.yaml"
        else:
            near = Path(path).stem
        hint = did_you_mean(near, [near] if near != Path(path).stem else names)
        raise ConfigError([Problem(group, "no-file", f"names {path}, and there is no such file{hint}")]) from None
    except (OSError, ValueError, RuntimeError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError([Problem(group, "unreadable", f"{path} can't be read: {error}")]) from error
    if not isinstance(keys, DictConfig) or not keys:
        raise ConfigError([Problem(group, "missing", f"{path} has no keys, such as `model:` or `run:`")])
    if _is_stored(Path(path).expanduser()) and "hooks" in (keys.get("run") or ()):
        keys.run.pop("hooks")
        file = replace(file, text=OmegaConf.to_yaml(keys))
    return file


def _is_stored(path: Path) -> bool:
    """Check if a file lies beside weights, as a run stores its configuration. Such a file must not name code to run."""
    return (path.parent / "manifest.json").exists() or (path.parent / "checkpoints").exists()


def unknown_name(group: str, name: str, names: Sequence[str]) -> Problem:
    """Return the problem for a name that neither the package nor the user's configs/ has, with the nearest names."""
    nearest = difflib.get_close_matches(name, names, NEAREST, cutoff=0)
    if len(names) <= NEAREST:
        known = f"have: {', '.join(names)}"
    else:
        known = f"nearest: {', '.join(nearest)}"
    path = next((path for path in (f"./{name}", f"./{name}.yaml") if is_file(path)), "./NAME.yaml")
    meant = did_you_mean(name, names)
    return Problem(group, "unknown-name", f"has no {name!r}{meant}; {known}; or a file of your own: {group}={path}")


def clashes(configs: Path, own: Path, choices: Mapping[str, str]) -> Iterator[Problem]:
    """Report names that the user's folder and the package define differently, if either file might be meant.

    A name is ambiguous if it was chosen. All names are ambiguous if any of the user's files was chosen, since that file
    may build on them.
    """
    twice = {
        (group, name)
        for group in groups_of(configs)
        for name in files_of(own, group)
        if (shipped := configs / group / f"{name}.yaml").is_file()
        and shipped.read_bytes() != (own / group / f"{name}.yaml").read_bytes()
    }
    of_user = any(_is_there(own, *pair) and not _is_there(configs, *pair) for pair in choices.items())
    for group, name in sorted(twice if of_user else twice & set(choices.items())):
        file = OWN / group / f"{name}.yaml"
        yield Problem(
            group, "duplicate", f"has two {name!r}: {file} and hybridtron's own, which differ: rename the former"
        )


def _is_there(folder: Path, group: str, name: str) -> bool:
    """Check if a folder has a file for this name."""
    return (folder / group / f"{name}.yaml").is_file()


def without_package(folders: Collection[Path]) -> list[Path]:
    """Return recipes without the `@package _global_` line, which places their keys at the top level."""
    recipes = (folder / "recipe" / f"{name}.yaml" for folder in folders for name in files_of(folder, "recipe"))
    return [recipe for recipe in recipes if not _PACKAGE.search(recipe.read_text(errors="replace"))]


def copy_into(configs: Path, own: Path | None, files: Collection[OutsideFile]) -> None:
    """Add the user's files to a copy of the package's configs/, and mark the copy as complete.

    `own` is the user's configs/ folder if there is one, and `files` are those that arguments named by their paths.
    """
    if own is not None:
        _copy_own(configs, own)
    for file in files:
        head = "" if _PACKAGE.search(file.text) else f"# @package {file.package}\n"
        (configs / file.group / f"{file.name}.yaml").write_text(head + file.text)
    lines = [f"{file.group}={file.name}: {Path(file.path).absolute()}" for file in files]
    (configs / COMPLETE).write_text("\n".join(["The package's files and the user's.", *lines, ""]))


def _copy_own(configs: Path, own: Path) -> None:
    """Copy the names of the user's folder that the package's groups do not have."""
    for group in groups_of(configs):
        for name in files_of(own, group):
            target = configs / group / f"{name}.yaml"
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((own / group / f"{name}.yaml").read_bytes())
