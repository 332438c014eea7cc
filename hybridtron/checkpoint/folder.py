"""A run's checkpoints: find the newest valid checkpoint, rename unusable checkpoints, and remove old checkpoints.

checkpoints/step-00000100/             a complete checkpoint: it gets this name when all files are on disk
checkpoints/latest                     the newest checkpoint's name and its manifest's digest
checkpoints/.step-00000100.temporary/  an incomplete checkpoint; if its save failed, the next save removes it
checkpoints/broken-step-00000100/      a checkpoint that was found to be broken; kept for inspection
checkpoints/superseded-step-00000100/  a checkpoint of a later step than the step that the run was restarted from
checkpoints/suspect-step-00000100/     a checkpoint that may hold corrupt values
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hybridtron.checkpoint import manifest
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.config.schema import CheckpointConfig
from hybridtron.safe_open import read_regular
from hybridtron.storage.digest import digest_of
from hybridtron.storage.durable import put

POINTER = "latest"
POINTER_BYTES = 1000  # largest pointer that is read


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / manifest.name_of(step)


def all_of(run_dir: Path) -> list[Path]:
    """List all checkpoints in a run's folder, oldest first. They are not verified."""
    return step_folders(run_dir / "checkpoints")


def step_folders(folder: Path) -> list[Path]:
    """List the folders of steps in a folder, oldest first."""
    return sorted((path for path in folder.glob("step-*") if is_name(path.name)), key=step_of)


def newest_up_to(run_dir: Path, steps: Iterable[int]) -> set[Path]:
    """Return the newest checkpoint up to each of these steps. They are not verified."""
    paths = all_of(run_dir)
    newest_paths = set[Path]()
    for step in steps:
        newest_paths.update([path for path in paths if step_of(path) <= step][-1:])
    return newest_paths


def is_name(name: str) -> bool:
    """Return True if a name has the form `step-00000100`."""
    return manifest.step_in(name) is not None


def belongs_to(run_dir: Path, folder: Path) -> bool:
    """Return True if a checkpoint is in this run's own folder."""
    return folder.resolve().parent == (run_dir / "checkpoints").resolve()


def step_of(folder: Path) -> int:
    step = manifest.step_in(folder.name)
    assert step is not None
    return step


def newest(run_dir: Path) -> Checkpoint | None:
    """Return the valid checkpoint with the highest step, or None; warn about each broken checkpoint with a higher step.

    Only the manifest and the configuration are verified here, not the tensors.
    """
    return next(valid_checkpoints(run_dir), None)


def valid_checkpoints(run_dir: Path) -> Iterator[Checkpoint]:
    """Yield the checkpoints whose manifest and configuration are valid, newest first.

    Warns about each checkpoint that is not valid, and about a fault in the file `latest`.
    """
    if fault := pointer_fault(run_dir):
        warnings.warn(f"{fault}; using the newest valid checkpoint in {run_dir / 'checkpoints'}", stacklevel=2)
    for folder in reversed(all_of(run_dir)):
        try:
            yield Checkpoint.open(folder)
        except BrokenCheckpoint as error:
            warnings.warn(f"{error}; looking for an older checkpoint", stacklevel=2)


def best(run_dir: Path) -> Checkpoint | None:
    """Return the valid checkpoint with the lowest held-out loss, or None if no valid checkpoint stores such a loss.

    Warns about each broken checkpoint. Only the manifest and the configuration are verified here, not the tensors.
    """
    checkpoint, faults = _best(all_of(run_dir))
    for fault in faults:
        warnings.warn(f"{fault}; looking for the lowest held-out loss in the other checkpoints", stacklevel=2)
    return checkpoint


def pointer_fault(run_dir: Path) -> str | None:
    """Describe the fault in the pointer (the file `latest`), or return None.

    The pointer has a fault in four cases:
    - the file is missing, although the run has two checkpoints or more
    - the file can't be read
    - the file names a checkpoint that is missing
    - the digest in the file is not the digest of the checkpoint's manifest
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
    name, _, digest = stored.decode("ascii", "replace").strip().partition(" ")
    target = path.parent / name
    if not is_name(name) or not target.is_dir():
        return f"{path} names the checkpoint {name!r}, which does not exist"
    try:
        is_same = digest_of(manifest.stored_in(target)) == digest
    except BrokenCheckpoint:
        is_same = False
    if is_same:
        return None
    return f"{path} has another digest than the manifest of {name}"


def point_at(folder: Path) -> None:
    """Write a checkpoint's name and digest into the pointer (the file `latest`), atomically."""
    pointer = folder.parent / POINTER
    if pointer.is_dir() and not pointer.is_symlink():
        archive(pointer, "broken")  # a checkpoint must be saved even if `latest` is a folder
    put(pointer, f"{folder.name} {digest_of(manifest.stored_in(folder))}\n".encode())


def archive_broken(folder: Path) -> str:
    """Rename a broken checkpoint, so that it is kept for inspection but not used again.

    Returns a message with the new path, or with the reason why the folder can't be renamed.
    """
    try:
        return f"the folder was renamed to {archive(folder, 'broken')}"
    except OSError as error:
        return f"{folder} can't be renamed: {error}"


def archive_newer_broken(run_dir: Path, than: int) -> Iterator[str]:
    """Rename all checkpoints of steps after `than` that can't be opened; yield a message for each.

    A checkpoint can't be opened if its manifest or its configuration is broken. Its tensors are not verified here.
    """
    for folder in reversed(all_of(run_dir)):
        if step_of(folder) > than and (fault := _fault(folder)):
            yield f"BROKEN CHECKPOINT: {fault}; {archive_broken(folder)}"


def _fault(folder: Path) -> str | None:
    """Return the reason why a checkpoint can't be opened, or None if it can be opened."""
    try:
        Checkpoint.open(folder)
    except BrokenCheckpoint as error:
        return str(error)
    return None


def archive(folder: Path, mark: str) -> Path:
    """Rename a folder `NAME` to `MARK-NAME`, or to `MARK-NAME-2`, `MARK-NAME-3`, ... if that name exists.

    Returns the new path.
    """
    target = folder.with_name(f"{mark}-{folder.name}")
    number = 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{mark}-{folder.name}-{number}")
    folder.rename(target)
    return target


def archive_later(run_dir: Path, after: int, mark: str = "superseded") -> list[Path]:
    """Rename all checkpoints of steps after `after` to `MARK-...`; return their new paths.

    A run that restarts at step `after` calls this, since it will write new checkpoints of the same steps. The pointer
    (the file `latest`) then names the newest valid checkpoint that is left.
    """
    folders = all_of(run_dir)
    later = [folder for folder in folders if step_of(folder) > after]
    archived = [archive(folder, mark) for folder in later]
    if archived:
        earlier = folders[: len(folders) - len(later)]
        with suppress(OSError):  # a pointer with a fault costs a warning, and the run must continue
            _point_at_newest(run_dir, earlier)
    return archived


def _point_at_newest(run_dir: Path, folders: Sequence[Path]) -> None:
    """Point at the last valid checkpoint in a list; remove the pointer if there is none."""
    for folder in reversed(folders):
        if _fault(folder) is None:
            point_at(folder)
            return
    (run_dir / "checkpoints" / POINTER).unlink(missing_ok=True)


def apply_retention(
    run_dir: Path,
    settings: CheckpointConfig,
    steps_for_ever: int | None,
    phase_ends: Collection[int] = (),
    in_use: Collection[Path] = (),
) -> list[str]:
    """Remove old checkpoints; return a message for each checkpoint that is broken or can't be removed.

    These checkpoints are kept:
    - the newest `settings.keep` valid checkpoints
    - the valid checkpoint with the lowest held-out loss, with `settings.keep_best`
    - checkpoints of the steps `phase_ends`
    - checkpoints of steps that are multiples of `steps_for_ever`
    - checkpoints in `in_use`

    Before any checkpoint is removed, the newest checkpoint is read back and verified. If it is broken, nothing is
    removed, since an old checkpoint might be the only usable checkpoint.
    """
    remove_temporaries(run_dir)
    newest_valid, failures = _newest_valid(run_dir, settings.keep)
    folders = all_of(run_dir)
    kept_folders = {*(checkpoint.folder for checkpoint in newest_valid), *in_use}
    kept_folders |= {folder for folder in folders if step_of(folder) in phase_ends}
    if steps_for_ever is not None:
        kept_folders |= {folder for folder in folders if step_of(folder) % steps_for_ever == 0}
    if settings.keep_best and (best := _best(folders)[0]):
        kept_folders.add(best.folder)
    old = [folder for folder in folders if folder not in kept_folders]
    if not old:
        return failures
    if fault := next(newest_valid[0].faults(), None):
        return [*failures, f"{fault}; nothing is removed, since this is the newest checkpoint"]
    for folder in old:
        try:
            # renamed first: if this process is killed, no incomplete folder has the name of a checkpoint
            removed = folder.with_name(f".{folder.name}.removed")
            folder.rename(removed)
            shutil.rmtree(removed)
        except OSError as error:
            failures.append(f"{folder} can't be removed: {error}")
    return failures


def remove_temporaries(run_dir: Path) -> None:
    """Remove the temporary folders left by failed or killed saves. Each can be as large as a checkpoint."""
    for leftover in (run_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _newest_valid(run_dir: Path, count: int) -> tuple[list[Checkpoint], list[str]]:
    """Return the newest `count` valid checkpoints, and a message for each newer checkpoint that is broken.

    Only manifest and configuration are verified. The broken checkpoints are archived.
    """
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


def _best(folders: list[Path]) -> tuple[Checkpoint | None, list[str]]:
    """Return the valid checkpoint with the lowest held-out loss, and a message for each broken checkpoint.

    The checkpoint is None if no valid checkpoint stores a held-out loss. Only manifest and configuration are verified.
    """
    best: Checkpoint | None = None
    lowest = math.inf
    messages = list[str]()
    for folder in folders:
        try:
            checkpoint = Checkpoint.open(folder)
        except BrokenCheckpoint as error:
            messages.append(str(error))
            continue
        loss = checkpoint.meta.validation
        if loss is not None and loss < lowest:
            best = checkpoint
            lowest = loss
    return best, messages
