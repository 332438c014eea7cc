"""The checkpoints of a run's folder: find the newest valid one, archive broken and superseded ones, remove old ones.

checkpoints/step-00000100/             a complete checkpoint: it gets this name when everything is on disk
checkpoints/latest                     the name of the newest and the digest of its manifest
checkpoints/.step-00000100.temporary/  being written; the next save removes the leftovers of a failed or killed one
checkpoints/broken-step-00000100/      found to be broken; kept for inspection
checkpoints/superseded-step-00000100/  from before the run restarted at an earlier step (older versions: left-...)
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
POINTER_BYTES = 1000  # largest pointer that is read


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / manifest.name_of(step)


def all_of(run_dir: Path) -> list[Path]:
    """List all checkpoints of a run's folder, oldest first. They are not verified."""
    paths = [path for path in (run_dir / "checkpoints").glob("step-*") if is_name(path.name)]
    return sorted(paths, key=step_of)


def is_name(name: str) -> bool:
    """Return True if a checkpoint's folder can have this name."""
    return manifest.step_in(name) is not None


def belongs_to(run_dir: Path, folder: Path) -> bool:
    """Return True if a checkpoint is in this run's own folder."""
    return folder.resolve().parent == (run_dir / "checkpoints").resolve()


def step_of(folder: Path) -> int:
    step = manifest.step_in(folder.name)
    assert step is not None
    return step


def newest(run_dir: Path) -> Checkpoint | None:
    """Return the valid checkpoint with the highest step, or None; warn about each broken one that is skipped.

    Only manifest and configuration are verified here.
    """
    return next(valid_checkpoints(run_dir), None)


def valid_checkpoints(run_dir: Path) -> Iterator[Checkpoint]:
    """Yield the checkpoints whose manifest and configuration are valid, newest first; warn about all others."""
    if fault := pointer_fault(run_dir):
        warnings.warn(f"{fault}; using the newest valid checkpoint", stacklevel=2)
    for folder in reversed(all_of(run_dir)):
        try:
            yield Checkpoint.open(folder)
        except BrokenCheckpoint as error:
            warnings.warn(f"{error}; looking for an older checkpoint", stacklevel=2)


def best(run_dir: Path) -> Checkpoint | None:
    """Return the checkpoint with the lowest held-out loss; None if no checkpoint has such a loss."""
    folder = _best(all_of(run_dir))
    if folder is None:
        return None
    return Checkpoint.open(folder)


def pointer_fault(run_dir: Path) -> str | None:
    """Describe the pointer's fault, or return None.

    Faults are: it is missing, it can't be read, its checkpoint is missing, or its digest does not fit the manifest. A
    missing pointer is not a fault while there are fewer than two checkpoints.
    """
    path = run_dir / "checkpoints" / POINTER
    try:
        stored = read_regular(path, POINTER_BYTES)
    except FileNotFoundError:
        if len(all_of(run_dir)) < 2:
            return None
        return f"{path} is missing"
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
    if fits:
        return None
    return f"{path} does not fit the manifest of {name}"


def point_at(folder: Path) -> None:
    """Make the pointer name a checkpoint, atomically."""
    pointer = folder.parent / POINTER
    if pointer.is_dir() and not pointer.is_symlink():
        _renamed(pointer, "broken")  # the pointer is only a hint: a folder of its name must not make the save fail
    put(pointer, f"{folder.name} {digest_of(manifest.stored_in(folder))}\n".encode())


def archive_broken(folder: Path) -> str:
    """Rename a broken checkpoint, so that it is kept for inspection but not used; return a message about the result."""
    try:
        return f"renamed to {_renamed(folder, 'broken')}"
    except OSError as error:
        return f"it stays where it is ({error})"


def archive_newer_broken(run_dir: Path, than: int) -> Iterator[str]:
    """Rename broken checkpoints from steps later than `than`; yield a message for each.

    Only those are renamed whose manifest or configuration is broken, which a start skips.
    """
    for folder in reversed(all_of(run_dir)):
        if step_of(folder) > than and (fault := _fault(folder)):
            yield f"BROKEN CHECKPOINT: {fault}; {archive_broken(folder)}"


def _fault(folder: Path) -> str | None:
    """Return the reason why a checkpoint can't be opened, or None."""
    try:
        Checkpoint.open(folder)
    except BrokenCheckpoint as error:
        return str(error)
    return None


def _renamed(folder: Path, mark: str) -> Path:
    """Rename a folder to `MARK-NAME`, or `MARK-NAME-2` and so on if that exists; return its new path."""
    target = folder.with_name(f"{mark}-{folder.name}")
    number = 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{mark}-{folder.name}-{number}")
    folder.rename(target)
    return target


def archive_later(run_dir: Path, after: int) -> list[Path]:
    """Rename checkpoints from steps later than `after`, because a run that restarts there supersedes them."""
    later = [folder for folder in all_of(run_dir) if step_of(folder) > after]
    return [_renamed(folder, "superseded") for folder in later]


def retire(
    run_dir: Path,
    settings: CheckpointConfig,
    steps_for_ever: int | None,
    phase_ends: Collection[int] = (),
    in_use: Collection[Path] = (),
) -> list[str]:
    """Remove checkpoints that `settings` no longer keep; return a message for each that could not be removed.

    Phase ends, multiples of `steps_for_ever`, and checkpoints in use are kept. Nothing is removed before every byte of
    the newest checkpoint was read back and verified: until then an older one may be the only usable one.
    """
    sweep(run_dir)
    newest_ones, failures = _newest_ones(run_dir, settings.keep)
    folders = all_of(run_dir)
    kept = {*(checkpoint.folder for checkpoint in newest_ones), *in_use}
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
    """Remove the temporary folders that failed or killed saves have left. Each can be as large as a checkpoint."""
    for leftover in (run_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _newest_ones(run_dir: Path, count: int) -> tuple[list[Checkpoint], list[str]]:
    """Return the newest `count` valid checkpoints; archive broken ones on the way and return a message for each."""
    checkpoints = list[Checkpoint]()
    messages = list[str]()
    for folder in reversed(all_of(run_dir)):
        if len(checkpoints) == count:
            break
        try:
            checkpoints.append(Checkpoint.open(folder))
        except BrokenCheckpoint as error:
            messages.append(f"BROKEN CHECKPOINT: {error}; {archive_broken(folder)}")
    return checkpoints, messages


def _best(folders: list[Path]) -> Path | None:
    """Return the folder with the lowest held-out loss, or None. Broken checkpoints are skipped."""
    losses = {}
    for folder in folders:
        try:
            validation = manifest.read(folder).meta.validation
        except BrokenCheckpoint:
            continue
        if validation is not None:
            losses[folder] = validation
    return min(losses, key=losses.__getitem__, default=None)
