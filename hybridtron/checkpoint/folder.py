"""The checkpoints of a run's folder: which is the newest valid one, which are archived, which are kept.

checkpoints/step-00000100/             a complete checkpoint: it gets this name when everything is on disk
checkpoints/latest                     the name of the newest and the digest of its manifest
checkpoints/.step-00000100.temporary/  being written; what a failed or killed save leaves there, the next save removes
checkpoints/broken-step-00000100/      found to be broken, for people to look at
checkpoints/superseded-step-00000100/  of a run that restarted from scratch or from an older checkpoint (once left-...)
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

from hybridtron.checkpoint import manifest
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.config.schema import CheckpointConfig
from hybridtron.regular_files import read_regular
from hybridtron.storage.digest import digest_of
from hybridtron.storage.durable import put

POINTER = "latest"
POINTER_BYTES = 1000  # at most


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / manifest.name_of(step)


def all_of(run_dir: Path) -> list[Path]:
    """Every checkpoint of a run's folder, the oldest first."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if is_name(path.name)]
    return sorted(found, key=step_of)


def is_name(name: str) -> bool:
    """Whether a checkpoint can be called so."""
    return manifest.step_in(name) is not None


def belongs_to(run_dir: Path, folder: Path) -> bool:
    """Whether a checkpoint is a run's own."""
    return folder.resolve().parent == (run_dir / "checkpoints").resolve()


def step_of(folder: Path) -> int:
    step = manifest.step_in(folder.name)
    assert step is not None
    return step


def newest(run_dir: Path) -> Checkpoint | None:
    """The checkpoint with the highest step whose manifest is valid; warns of each other one that it skips."""
    return next(valid_checkpoints(run_dir), None)


def valid_checkpoints(run_dir: Path) -> Iterator[Checkpoint]:
    """The checkpoints whose manifests are valid, the newest first; warns of each other one."""
    if fault := pointer_fault(run_dir):
        warnings.warn(f"{fault}; using the newest valid checkpoint", stacklevel=2)
    for folder in reversed(all_of(run_dir)):
        try:
            yield Checkpoint.open(folder)
        except BrokenCheckpoint as error:
            warnings.warn(f"{error}; looking for an older checkpoint", stacklevel=2)


def best(run_dir: Path) -> Checkpoint | None:
    """The checkpoint with the lowest held-out loss, of those that were written where it was measured."""
    folder = _best(all_of(run_dir))
    return None if folder is None else Checkpoint.open(folder)


def pointer_fault(run_dir: Path) -> str | None:
    """What is wrong with the pointer: it names a checkpoint that is not there, or not the one that it was."""
    path = run_dir / "checkpoints" / POINTER
    try:
        stored = read_regular(path, POINTER_BYTES)
    except FileNotFoundError:
        return None if len(all_of(run_dir)) < 2 else f"{path} is missing"
    except OSError as error:
        return f"{path} can't be read: {error}"
    name, _, digested = stored.decode("ascii", "replace").strip().partition(" ")
    target = path.parent / name
    if not is_name(name) or not target.is_dir():
        return f"{path} names {name!r}, which is not there"
    try:
        fits = digest_of(manifest.stored_in(target)) == digested
    except BrokenCheckpoint:
        fits = False
    return None if fits else f"{path} does not fit the manifest of {name}"


def point_at(folder: Path) -> None:
    """Make the pointer name a checkpoint that is on disk, in one step."""
    pointer = folder.parent / POINTER
    if pointer.is_dir() and not pointer.is_symlink():
        _renamed(pointer, "broken")  # only a hint: a checkpoint must not fail because of it
    put(pointer, f"{folder.name} {digest_of(manifest.stored_in(folder))}\n".encode())


def archive_broken(folder: Path) -> str:
    """Rename a broken checkpoint, so that it is neither used nor counted, and can be looked at; how it went."""
    try:
        return f"renamed to {_renamed(folder, 'broken')}"
    except OSError as error:
        return f"it stays where it is ({error})"


def archive_newer_broken(run_dir: Path, than: int) -> Iterator[str]:
    """Rename those of later steps that a start has skipped, as their manifests are not valid; a message for each."""
    for folder in reversed(all_of(run_dir)):
        if step_of(folder) > than and (fault := _fault(folder)):
            yield f"BROKEN CHECKPOINT: {fault}; {archive_broken(folder)}"


def _fault(folder: Path) -> str | None:
    """What keeps a checkpoint from being opened."""
    try:
        Checkpoint.open(folder)
    except BrokenCheckpoint as error:
        return str(error)
    return None


def _renamed(folder: Path, mark: str) -> Path:
    target = folder.with_name(f"{mark}-{folder.name}")
    number = 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{mark}-{folder.name}-{number}")
    folder.rename(target)
    return target


def archive_later(run_dir: Path, after: int) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that starts before them does not continue."""
    later = [folder for folder in all_of(run_dir) if step_of(folder) > after]
    return [_renamed(folder, "superseded") for folder in later]


def retire(
    run_dir: Path,
    settings: CheckpointConfig,
    steps_for_ever: int | None,
    phase_ends: Collection[int] = (),
    in_use: Collection[Path] = (),
) -> list[str]:
    """Remove what `settings` no longer keep and nothing reads; messages about what could not be removed.

    The ends of phases are kept for good. Nothing is removed before every byte of the newest checkpoint was read back
    and has its digest: until then an older one may be the only one that can be used.
    """
    sweep(run_dir)
    newest_ones, failures = _newest_ones(run_dir, settings.keep)
    folders = all_of(run_dir)
    kept = {*(one.folder for one in newest_ones), *in_use}
    kept |= {folder for folder in folders if step_of(folder) in phase_ends}
    if steps_for_ever is not None:
        kept |= {folder for folder in folders if step_of(folder) % steps_for_ever == 0}
    if settings.keep_best and (best := _best(folders)):
        kept.add(best)
    old = [folder for folder in folders if folder not in kept]
    if not old:
        return failures
    if fault := next(newest_ones[0].faults(), None):
        return [*failures, f"{fault}; nothing is removed"]
    for folder in old:
        try:
            removed = folder.with_name(f".{folder.name}.removed")  # a half-removed checkpoint must not look like one
            folder.rename(removed)
            shutil.rmtree(removed)
        except OSError as error:
            failures.append(f"{folder} can't be removed: {error}")
    return failures


def sweep(run_dir: Path) -> None:
    """Remove the temporary folders of failed or killed saves: each can be as large as a checkpoint."""
    for leftover in (run_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _newest_ones(run_dir: Path, count: int) -> tuple[list[Checkpoint], list[str]]:
    """The newest `count` valid checkpoints, and a message for each broken one, which is renamed."""
    found, messages = list[Checkpoint](), list[str]()
    for folder in reversed(all_of(run_dir)):
        if len(found) == count:
            break
        try:
            found.append(Checkpoint.open(folder))
        except BrokenCheckpoint as error:
            messages.append(f"BROKEN CHECKPOINT: {error}; {archive_broken(folder)}")
    return found, messages


def _best(folders: list[Path]) -> Path | None:
    """The checkpoint with the lowest held-out loss."""
    losses = {}
    for folder in folders:
        try:
            validation = manifest.read(folder).meta.validation
        except BrokenCheckpoint:
            continue
        if validation is not None:
            losses[folder] = validation
    return min(losses, key=losses.__getitem__, default=None)
