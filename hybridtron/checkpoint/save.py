"""Writing checkpoints: each process writes its own shards, and rank 0 completes the checkpoint.

1. Every process writes its tensors into its part of the node's files, in a temporary folder, and flushes them to disk.
   Then it writes a record with the digests into the node's list (`node_files.py`).
2. Rank 0 waits until the records of all processes exist, and writes the manifest from them. Then it renames the folder
   to its final name, updates the pointer `latest`, and removes old checkpoints.

A process that is killed at any point leaves the older checkpoints intact, and a temporary folder that the next save
removes. Rank 0 polls the file system for the records, so that no rank has to wait for another rank in a collective.

With `checkpoint.asynchronous` threads write the checkpoint from copies of the tensors, while training continues.
Weights and Adam's moments are copied during the next forward and backward pass, which leave them unchanged. The next
update waits for these copies. Each copy is checked for NaN and infinity when it is made. After the update all processes
call `Saver.check`. It raises NotFinite on all processes if any process found NaN or infinity.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridtron.checkpoint import folder as folders
from hybridtron.checkpoint.async_copy import Copier, Copies
from hybridtron.checkpoint.content import Content, content_of, content_of_node, record_of
from hybridtron.checkpoint.files import write_bytes
from hybridtron.checkpoint.finite import KINDS, NotFinite, all_finite, not_finite
from hybridtron.checkpoint.local_save import LocalWriter
from hybridtron.checkpoint.manifest import (
    FILE,
    BrokenCheckpoint,
    CheckpointManifest,
    File,
    Meta,
    StoredShard,
    chunk_of,
    to_bytes,
)
from hybridtron.checkpoint.mirror import Mirror
from hybridtron.checkpoint.node_files import (
    NodePart,
    Records,
    failure_record,
    file_name,
    plan_part,
    room_for,
    write_kinds,
)
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.config.units import parse_steps
from hybridtron.engine.engine import Engine
from hybridtron.file_errors import room_left
from hybridtron.parallel.groups import Groups
from hybridtron.storage.durable import sync, temporary_of

POLL_INTERVAL_S = 0.02  # seconds between two looks for a process's record


class SaveError(RuntimeError):
    """Raised when too many checkpoints in a row, or a run's last checkpoint, could not be written."""


@dataclass(frozen=True)
class SavePlan:
    """The plan for writing a checkpoint: its temporary folder, this rank's part, and the places of all ranks' records.

    `folder_error` is the error with which rank 0 failed to create the folder, or None.
    """

    temporary: Path
    folder_error: OSError | None
    part: NodePart
    records: Records


class Saver:
    """A writer for a run's checkpoints. It writes one checkpoint at a time, and counts consecutive failures."""

    def __init__(
        self,
        plan: RunPlan,
        run_dir: Path,
        groups: Groups,
        *,
        local: LocalWriter | None = None,
        patience_s: float = 600.0,
        on_written: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.config = plan.config
        self.run_dir = run_dir
        self.groups = groups
        self.local = local  # writes node-local checkpoints; None without `checkpoint.local_dir`
        self.patience_s = patience_s  # how long rank 0 waits for the record of each process
        self.on_written = on_written  # called on all processes when a checkpoint is on disk, with its step
        self.phase_ends = {phase.end_step for phase in plan.phases}
        self.failures = 0  # checkpoints in a row that could not be written
        self._under_way: Future[None] | None = None  # the write in the background thread
        self._is_local = False  # True if a node-local checkpoint is being written
        self._thread, self._copier = ThreadPoolExecutor(1, "checkpoint"), Copier()
        self.step = 0  # step of the last checkpoint, which may still be being written
        self.written: set[int] = set()  # steps whose checkpoints are on disk
        self._unchecked: Copies | None = None  # copies of an asynchronous checkpoint, until `check` is called
        self.longest_s = 0.0  # seconds that the slowest checkpoint took to write
        self.mirror = mirror_of(self.config) if groups.is_first else None
        # last step that each kind of check for corruption has verified; the newest checkpoint up to each step is kept
        self.verified: frozenset[int] = frozenset()

    def save(self, engine: Engine, meta: Meta, tokenizer: Path) -> None:
        """Write a step's checkpoint, or with `checkpoint.asynchronous` start to write it.

        If weights or moments contain NaN or infinity, this method raises NotFinite before anything is written. With
        `checkpoint.asynchronous` the method `check` raises NotFinite instead.
        """
        self.settle()  # the previous checkpoint must be done: it uses the same memory and the same thread
        self.step = meta.step
        temporary = temporary_of(folders.folder_of(self.run_dir, meta.step))
        content = content_of(engine, meta, tokenizer)
        copies = self._copies_of(content, engine)
        self._is_local = False
        self._under_way = self._thread.submit(self._run, self._prepare(content, temporary), content, copies)
        if not self.config.checkpoint.asynchronous:
            self.settle()

    def save_locally(self, engine: Engine, meta: Meta, tokenizer: Path) -> None:
        """Write a step's node-local checkpoint, or with `checkpoint.asynchronous` start to write it.

        A failure is only reported: training continues, since it can resume from checkpoints in the run's folder.
        """
        assert self.local is not None
        self.settle()
        self.step = meta.step
        content = content_of_node(engine, meta, tokenizer)
        copies = self._copies_of(content, engine)
        self._is_local = True
        self._under_way = self._thread.submit(self.local.write, self.local.plan(content), copies)
        if not self.config.checkpoint.asynchronous:
            self.settle()

    def _copies_of(self, content: Content, engine: Engine) -> Copies | None:
        """With `checkpoint.asynchronous` start to copy the content; else look for NaN and infinity, and return None."""
        if self.config.checkpoint.asynchronous:
            self._unchecked = copies = self._copier.start(content.blocks)
            engine.pending_copies = copies.trained
            return copies
        fault = not_finite([shard for kind in KINDS for shard in content.blocks.get(kind, ())])
        all_finite(fault, self.groups.control)
        return None

    def check(self) -> None:
        """Wait for the copies of an asynchronous checkpoint, and check them for NaN and infinity.

        If a copy of any process contains NaN or infinity, the temporary folder is removed, and NotFinite is raised on
        all processes. All processes call this together.
        """
        if self._unchecked is None:
            return
        fault = self._unchecked.fault()
        self._unchecked = None
        try:
            all_finite(fault, self.groups.control)
        except NotFinite:
            self._wait_for_write()
            self.groups.control.barrier()  # all processes have stopped writing
            if self.groups.is_first:
                folders.remove_temporaries(self.run_dir)
            raise

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is on disk; report and count a failure.

        Raises SaveError if `checkpoint.failures` checkpoints in a row have failed, and NotFinite as `check` does. All
        processes call this together, and all get the same result.
        """
        self.check()
        if self._under_way is None:
            return
        error = self._wait_for_write()
        faults = self.groups.control.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        fault = next(filter(None, faults), None)
        if self._is_local:
            if fault is not None and self.groups.is_first:
                print(f"LOCAL CHECKPOINT NOT WRITTEN at step {self.step}: {fault}; training continues", file=sys.stderr)
            return
        if fault is None:
            self.failures = 0
            self.written.add(self.step)
            self.on_written(self.step)
            return
        self.failures += 1
        limit = self.config.checkpoint.failures
        if self.groups.is_first:
            print(f"CHECKPOINT NOT WRITTEN at step {self.step} ({self.failures} of {limit}): {fault}", file=sys.stderr)
            # the unfinished files take space, and the disk may be full
            folders.remove_temporaries(self.run_dir)
        if self.failures >= limit:
            raise SaveError(f"{self.failures} checkpoints in a row could not be written; the last failure: {fault}")

    def _wait_for_write(self) -> BaseException | None:
        """Wait until the background thread has written the checkpoint; return its exception, or None."""
        assert self._under_way is not None
        error = self._under_way.exception()
        self._under_way = None
        return error

    def finish(self) -> None:
        """Wait for a run's last checkpoint. Raises SaveError if it could not be written."""
        self.settle()
        if self.failures:
            raise SaveError(f"the run's last checkpoint, of step {self.step}, could not be written")

    def _prepare(self, content: Content, temporary: Path) -> SavePlan:
        """Create an empty temporary folder on rank 0, and plan the files. All processes call this together."""
        folder_error = None
        if self.groups.is_first:
            try:
                folders.remove_temporaries(self.run_dir)
                temporary.mkdir(parents=True)
            except OSError as error:
                folder_error = error  # raised later, in `_run`: all processes must reach the exchange first
        control = self.groups.control
        part = plan_part(content.blocks, control)
        # rank 0 joins this exchange after it has created the folder, so no process writes before the folder exists
        rooms = control.all_gather(room_for(record_of(content, part, part.chunks)))
        return SavePlan(temporary, folder_error, part, Records(control.nodes, rooms))

    def _run(self, plan: SavePlan, content: Content, copies: Copies | None) -> None:
        """Write this process's files; on rank 0 also complete the checkpoint. `settle` reports exceptions."""
        began = time.monotonic()
        if plan.folder_error is not None:
            raise plan.folder_error
        self._write(plan, content, copies)
        if self.groups.is_first:
            self._seal(plan, content.meta)
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def _write(self, plan: SavePlan, content: Content, copies: Copies | None) -> None:
        """Write this process's files, and then its record.

        If a file can't be written, the record contains the error instead.
        """
        temporary = plan.temporary
        rank = self.groups.rank
        try:
            plan.records.reserve(temporary, rank)
            for name, stored in content.small.items():
                write_bytes(temporary / name, stored)
            if copies is None:
                blocks = content.blocks
            else:
                blocks = copies.blocks()
            written_chunks = write_kinds(temporary, plan.part, blocks, self.groups.control.node)
            values = record_of(content, plan.part, written_chunks)
        except Exception as error:  # after any error rank 0 still waits for this record
            needed = sum(shard.data.nbytes for of_file in content.blocks.values() for shard in of_file)
            reason = f"{type(error).__name__}: {error}{room_left(error, temporary, needed)}"
            values = failure_record(f"rank {rank}: {reason}")
            for kind in plan.part.kinds:  # on a full disk, this makes room when no rank has the file open any more
                with suppress(OSError):
                    (temporary / file_name(kind, self.groups.control.node)).unlink(missing_ok=True)
        plan.records.put(temporary, rank, values)

    def _seal(self, plan: SavePlan, meta: Meta) -> None:
        """Complete a checkpoint, on rank 0.

        Collects the records of all processes, writes the manifest, and renames the folder. Then updates the pointer
        `latest`, starts the upload to the mirror, and removes old checkpoints.
        """
        temporary = plan.temporary
        target = temporary.with_name(temporary.name[1:].removesuffix(".temporary"))
        files: dict[str, File] = {}
        chunks: list[StoredShard] = []
        keys: set[str] = set()
        for rank in range(self.groups.world_size):
            values = self._record_of(plan, rank)
            files.update({name: File(**file) for name, file in values["files"].items()})
            chunks += map(chunk_of, values["chunks"])
            keys.update(values["keys"])
        manifest = CheckpointManifest(meta, files, tuple(chunks))
        unwritten = keys - {chunk.key for chunk in chunks}
        if missing := [*manifest.incomplete(), *sorted(unwritten)]:
            raise BrokenCheckpoint(f"parts of these tensors were written by no process: {missing}", code="missing")
        for list_file in temporary.glob("list-*"):
            list_file.unlink()
        # The files are on disk before the folder is renamed. So after a crash the folder `target` is complete, or there
        # is no folder of this name.
        write_bytes(temporary / FILE, to_bytes(manifest))
        sync(temporary)
        replaced = target.with_name(f".{target.name}.removed")
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        temporary.rename(target)
        sync(target.parent)
        folders.point_at(target)
        shutil.rmtree(replaced, ignore_errors=True)
        if self.mirror is not None:
            self.mirror.offer(target)
        in_use = set() if self.mirror is None else set(self.mirror.in_use())
        in_use |= folders.newest_up_to(self.run_dir, self.verified)
        settings = self.config.checkpoint
        for failure in folders.apply_retention(self.run_dir, settings, self._kept_every(), self.phase_ends, in_use):
            print(failure, file=sys.stderr)

    def _record_of(self, plan: SavePlan, rank: int) -> dict[str, Any]:
        """Wait until a process has written its record, and read the record.

        Raises OSError if the record has an error, and TimeoutError if there is no record after `patience_s` seconds.
        """
        deadline = time.monotonic() + self.patience_s
        while (values := plan.records.read(plan.temporary, rank)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} has not written its part in {self.patience_s:.0f} s")
            time.sleep(POLL_INTERVAL_S)
        if "failure" in values:
            raise OSError(values["failure"])
        return values

    def _kept_every(self) -> int | None:
        every = self.config.checkpoint.keep_every
        if every is None:
            return None
        return parse_steps(every, self.config.phases[0].tokens_per_step)


def mirror_of(config: Config) -> Mirror | None:
    """Return the mirror (a store for copies of checkpoints), or None if `checkpoint.mirror` is not set."""
    if config.checkpoint.mirror is None:
        return None
    return Mirror(config.checkpoint.mirror)


def layout_of(config: Config, groups: Groups) -> str:
    """Describe a parallel layout as text: the sizes of tensor, pipeline, context and data parallelism.

    A checkpoint stores the text. A resumed run compares it with its own layout, to decide whether each rank can load
    the random states that the rank of the same number wrote.
    """
    stages = f"pipeline {groups.pipeline.size} x {config.parallel.virtual_pipeline}"
    if groups.context.size > 1:
        context = f"context {groups.context.size}, "
    else:
        context = ""
    return f"tensor {groups.tensor.size}, {stages}, {context}data {groups.data.size}"


def meta_of(
    engine: Engine,
    step: int,
    data: dict[str, str],
    validation: float | None = None,
    windows: Sequence[Sequence[int]] = (),
) -> Meta:
    return Meta(
        step,
        engine.optimizer.accepted_steps,
        data,
        layout_of(engine.config, engine.groups),
        torch.__version__,
        validation,
        list(engine.guard.norms),
        engine.guard.refused,
        [list(window) for window in windows],
    )
