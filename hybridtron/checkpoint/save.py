"""Writing checkpoints: each process writes its own blocks, and the first process seals the checkpoint.

    every process    write tensors into files in a temporary folder, flush and digest each; then write a list of them
    first process    wait for all lists; write the manifest; rename the folder; update the pointer; remove old ones

A process that is killed at any point leaves older checkpoints untouched, and a temporary folder that nothing reads. The
lists are exchanged through the file system, so that no process waits for another in a collective.

With `checkpoint.asynchronous` threads do all this from copies, while training continues. Weights and moments are copied
during the next forward and backward pass, which only read them; the engine's next update waits for the copies. Each
copy is checked for NaN and infinity when it is made; `check` reports the result to all processes after the update.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hybridtron.checkpoint import folder as folders
from hybridtron.checkpoint.copies import Copier, Copies
from hybridtron.checkpoint.files import write_bytes, write_tensors
from hybridtron.checkpoint.finite import KINDS, NotFinite, all_finite, not_finite
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
from hybridtron.config.load import to_yaml
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.config.units import parse_steps
from hybridtron.device import random_states
from hybridtron.engine.engine import Engine
from hybridtron.file_errors import room_left
from hybridtron.parallel.blocks import block
from hybridtron.parallel.groups import Groups, barrier
from hybridtron.parallel.plain_values import all_gather_values
from hybridtron.storage.durable import put, sync, temporary_of

WRITERS = 2  # threads: one flushes while the other digests
LOOK_S = 0.02  # seconds between two looks for the other processes' lists


class SaveError(RuntimeError):
    """Raised when too many checkpoints in a row, or a run's last one, could not be written."""


@dataclass(frozen=True)
class Content:
    """One process's part of a checkpoint: tensor shards by file kind, and (on the first process) small files."""

    meta: Meta
    blocks: dict[str, Sequence[Any]]
    small: dict[str, bytes]


class Saver:
    """A writer for a run's checkpoints: one at a time, with failures in a row counted."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        groups: Groups,
        *,
        patience_s: float = 600.0,
        on_written: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.groups = groups
        self.patience_s = patience_s
        self.on_written = on_written  # called on all processes with the step of each checkpoint that is on disk
        self.phase_ends = {phase.end_step for phase in resolve(config)}
        self.failures = 0
        self._under_way: Future[None] | None = None
        self._thread, self._copier = ThreadPoolExecutor(1, "checkpoint"), Copier()
        self.step = 0  # step of the checkpoint that is being written, or of the last one
        self.written: set[int] = set()  # steps whose checkpoints are on disk
        self._unchecked: Copies | None = None  # of an asynchronous checkpoint that `check` has not yet checked
        self.longest_s = 0.0  # seconds that the slowest checkpoint took from start to end
        self.mirror = mirror_of(config) if groups.is_first else None

    def save(self, engine: Engine, meta: Meta, tokenizer: Path) -> None:
        """Write a step's checkpoint. Without `checkpoint.asynchronous` it is on disk when this returns.

        In that case NotFinite is raised, before anything is written, if weights or moments are not finite; else by
        `check`.
        """
        self.settle()
        self.step = meta.step
        temporary = temporary_of(folders.folder_of(self.run_dir, meta.step))
        content = content_of(engine, meta, tokenizer)
        if self.config.checkpoint.asynchronous:
            self._unchecked = copies = self._copier.start(content.blocks)
            engine.readers = copies.trained
        else:
            copies = None
            all_finite(not_finite([shard for kind in KINDS for shard in content.blocks.get(kind, ())]))
        self._under_way = self._thread.submit(self._run, self._prepare(temporary), content, copies, temporary)
        if not self.config.checkpoint.asynchronous:
            self.settle()

    def check(self) -> None:
        """Wait for an asynchronous checkpoint's copies; raise NotFinite on all processes if any copy is not finite.

        In that case its temporary folder is removed, and nothing is sealed. All processes call this together.
        """
        if self._unchecked is None:
            return
        fault = self._unchecked.fault()
        self._unchecked = None
        try:
            all_finite(fault)
        except NotFinite:
            self._end()
            barrier()
            if self.groups.is_first:
                folders.sweep(self.run_dir)
            raise

    def settle(self) -> None:
        """Wait for the checkpoint that is being written; count a failure, or raise SaveError after too many in a row.

        All processes call this together, and all get the same result.
        """
        self.check()
        if self._under_way is None:
            return
        error = self._end()
        faults = all_gather_values(None if error is None else f"{type(error).__name__}: {error}")
        fault = next(filter(None, faults), None)
        if fault is None:
            self.failures = 0
            self.written.add(self.step)
            self.on_written(self.step)
            return
        self.failures += 1
        limit = self.config.checkpoint.failures
        if self.groups.is_first:
            print(f"CHECKPOINT NOT WRITTEN at step {self.step} ({self.failures} of {limit}): {fault}", file=sys.stderr)
            folders.sweep(self.run_dir)  # a full disk may be why it failed, and the unfinished files take room
        if self.failures >= limit:
            raise SaveError(f"{self.failures} checkpoints in a row could not be written; the last: {fault}")

    def _end(self) -> BaseException | None:
        """Wait for the write under way, and return the exception that it failed with, or None."""
        assert self._under_way is not None
        error = self._under_way.exception()
        self._under_way = None
        return error

    def finish(self) -> None:
        """Wait for a run's last checkpoint. Raises SaveError if it could not be written."""
        self.settle()
        if self.failures:
            raise SaveError(f"the checkpoint of step {self.step}, the last one, could not be written")

    def _prepare(self, temporary: Path) -> OSError | None:
        """Create an empty temporary folder on the first process; return the error that this raised, or None."""
        failure = None
        if self.groups.is_first:
            try:
                folders.sweep(self.run_dir)
                temporary.mkdir(parents=True)
            except OSError as error:
                failure = error
        barrier()
        return failure

    def _run(self, prepared: OSError | None, content: Content, copies: Copies | None, temporary: Path) -> None:
        """Write a checkpoint, and seal it on the first process; `settle` reports exceptions."""
        began = time.monotonic()
        if prepared is not None:
            raise prepared
        self._write(content, copies, temporary)
        if self.groups.is_first:
            self._seal(content.meta, temporary)
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def _write(self, content: Content, copies: Copies | None, temporary: Path) -> None:
        """Write this process's files and then their list. If that fails, write a list that holds the error."""
        files: dict[str, File] = {}
        chunks: list[StoredShard] = []
        listed = temporary / f"list-{self.groups.rank:05}.json"
        try:
            for name, stored in content.small.items():
                files[name] = write_bytes(temporary / name, stored)
            if copies is None:
                blocks = content.blocks
            else:
                blocks = copies.blocks()
            tensors = {f"{kind}-{self.groups.rank:05}.safetensors": b for kind, b in blocks.items() if b}
            with ThreadPoolExecutor(WRITERS) as threads:
                for name, written in zip(
                    tensors,
                    threads.map(lambda name: write_tensors(temporary / name, tensors[name]), tensors),
                    strict=True,
                ):
                    files[name] = written[0]
                    chunks += written[1]
            values = {"files": {name: asdict(file) for name, file in files.items()}, "chunks": chunks}
        except (OSError, NotFinite) as error:
            needed = sum(shard.data.nbytes for of_file in content.blocks.values() for shard in of_file)
            why = f"{type(error).__name__}: {error}{room_left(error, temporary, needed)}"
            values = {"failure": f"process {self.groups.rank}: {why}"}
            for unfinished in temporary.glob(f"*-{self.groups.rank:05}.safetensors"):
                unfinished.unlink(missing_ok=True)  # on a full disk they would leave no room for the list
        put(listed, json.dumps(values).encode())

    def _seal(self, meta: Meta, temporary: Path) -> None:
        """Complete a checkpoint: collect all lists, write the manifest, rename the folder, retire older ones."""
        target = temporary.with_name(temporary.name[1:].removesuffix(".temporary"))
        files: dict[str, File] = {}
        chunks: list[StoredShard] = []
        for rank in range(self.groups.world_size):
            values = self._list_of(temporary / f"list-{rank:05}.json")
            files.update({name: File(**file) for name, file in values["files"].items()})
            chunks += map(chunk_of, values["chunks"])
        manifest = CheckpointManifest(meta, files, tuple(chunks))
        if missing := manifest.incomplete():
            raise BrokenCheckpoint(f"no process wrote all of {missing}")
        for listed in temporary.glob("list-*"):
            listed.unlink()
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
        in_use = () if self.mirror is None else self.mirror.in_use()
        settings = self.config.checkpoint
        for failure in folders.retire(self.run_dir, settings, self._kept_every(), self.phase_ends, in_use):
            print(failure, file=sys.stderr)

    def _list_of(self, path: Path) -> dict[str, Any]:
        """Wait for a process's list and read it. Raises OSError if that process failed, and TimeoutError."""
        deadline = time.monotonic() + self.patience_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {int(path.stem[5:])} has not written its part in {self.patience_s:.0f} s")
            time.sleep(LOOK_S)
        values = json.loads(path.read_bytes())
        if "failure" in values:
            raise OSError(values["failure"])
        return values

    def _kept_every(self) -> int | None:
        every = self.config.checkpoint.keep_every
        if every is None:
            return None
        return parse_steps(every, self.config.phases[0].tokens_per_step)


def mirror_of(config: Config) -> Mirror | None:
    """Open the store that checkpoints are copied to, or return None if `checkpoint.mirror` is not set."""
    if config.checkpoint.mirror is None:
        return None
    return Mirror(config.checkpoint.mirror)


def content_of(engine: Engine, meta: Meta, tokenizer: Path) -> Content:
    """Collect the blocks and small files that this process writes; replicated tensors are written only once."""
    groups = engine.groups
    blocks: dict[str, Sequence[Any]] = {
        name: [shard for shard in of_file if shard.replica_id == 0] for name, of_file in engine.blocks().items()
    }
    blocks["random"] = [
        block(f"random.{groups.rank}.{name}", tuple(state.shape), (0,) * state.dim(), state, main=True)
        for name, state in random_states().items()
    ]
    small = {}
    if groups.is_first:
        small = {"config.yaml": to_yaml(engine.config).encode(), "tokenizer.json": tokenizer.read_bytes()}
    return Content(meta, blocks, small)


def layout_of(config: Config, groups: Groups) -> str:
    """Describe a layout as text, for users, and to recognize whether a checkpoint's random states fit its processes."""
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
