"""Writing of node-local checkpoints: each node writes its part to its own disk, and sends a copy to the next node.

All of this happens in the thread that writes checkpoints. Ranks of a node hand their records to the node's first rank
over a control group of this thread, so that a full disk stops no rank. Then the first rank completes the part and sends
its files to the next node's first rank, while it receives the files of the node before. The newest two steps are kept.
"""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridtron.checkpoint.async_copy import Copies
from hybridtron.checkpoint.content import Content, record_of
from hybridtron.checkpoint.files import write_bytes
from hybridtron.checkpoint.local import (
    RECORD,
    LocalCheckpoint,
    NodePartRecord,
    drop_after,
    keep_newest,
    part_name,
    remove,
    remove_temporaries,
)
from hybridtron.checkpoint.local_files import Receiver, Sender, files_in, files_of, pass_files
from hybridtron.checkpoint.local_identity import Identity, with_limit
from hybridtron.checkpoint.manifest import FILE, CheckpointManifest, File, chunk_of, name_of, to_bytes
from hybridtron.checkpoint.node_files import NodePart, plan_part, write_kinds
from hybridtron.file_errors import room_left
from hybridtron.parallel.control import Control, node_name
from hybridtron.storage.durable import sync, temporary_of

NUM_KEPT = 2  # local checkpoints that stay on a node


@dataclass(frozen=True)
class LocalPlan:
    """The plan for a node's part: the step's temporary folder, this rank's part of the files, and its content.

    `folder_error` is the error with which the node's first rank failed to create the folder, or None.
    """

    temporary: Path
    folder_error: OSError | None
    part: NodePart
    content: Content


class LocalWriter:
    """A writer for a node's local checkpoints.

    folder: this node's folder
    control: the training thread's control group; `plan` uses it
    background: another control group, for the thread that calls `write`
    layout: the parallel layout, as text
    run_dir: the run's folder, with the file of its `identity`
    """

    def __init__(
        self, folder: Path, control: Control, background: Control, layout: str, *, run_dir: Path, identity: Identity
    ) -> None:
        self.folder = folder
        self.run_dir = run_dir
        self.identity = identity
        self.control = control
        self.background = background
        self.layout = layout

    def plan(self, content: Content) -> LocalPlan:
        """Create the temporary folder, and plan the node's files. All ranks call this together."""
        control = self.control
        temporary = temporary_of(self.folder / name_of(content.meta.step))
        folder_error = None
        save = control.once(lambda: secrets.token_hex(8))
        if control.leads:
            record = NodePartRecord(
                save, control.node, control.nodes, self.layout, len(self.identity.limits)
            ).to_bytes()
            content = replace(content, small={**content.small, RECORD: record})
            try:
                remove_temporaries(self.folder)
                (temporary / part_name(control.node)).mkdir(parents=True)
            except OSError as error:
                folder_error = error  # reported by `write`: all ranks must reach the exchange first
        return LocalPlan(temporary, folder_error, plan_part(content.blocks, control), content)

    def write(self, plan: LocalPlan, copies: Copies | None) -> None:
        """Write this rank's files; on a node's first rank also complete the part and exchange copies.

        Raises OSError on the first rank of a node whose part or copy could not be written. All ranks call this, each in
        its thread for checkpoints.
        """
        records = self.background.all_gather_on_node(self._write_files(plan, copies))
        if not self.background.leads:
            return
        faults = [record["failure"] for record in records if "failure" in record]
        part: LocalCheckpoint | None = None
        if not faults:
            try:
                part = self._complete(plan, records)
            except Exception as error:  # the next node still waits for a message
                faults.append(str(error))
        faults += self._exchange(plan, part)
        # a step of which a node lacks its part or copy must not replace an older, complete one
        if all(self.background.all_gather_of_leaders(not faults)):
            try:
                self._publish(plan)
            except OSError as error:
                faults.append(str(error))
        else:
            shutil.rmtree(plan.temporary, ignore_errors=True)
        if faults:
            raise OSError(f"node {node_name()}: {'; '.join(faults)}")

    def reject_after(self, step: int) -> None:
        """Remove all local checkpoints of steps after `step`. Those that can't be removed now are never used.

        Leftovers of killed saves are removed, too. All ranks call this together, when no local checkpoint is being
        written.
        """
        limited = self.control.once(lambda: with_limit(self.run_dir, self.identity, step).values())
        self.identity = Identity.of(limited)
        if self.control.leads:
            try:
                drop_after(self.folder, step)
            except OSError as error:
                print(
                    f"LOCAL CHECKPOINT: node {node_name()} can't remove those after step {step}: {error}",
                    file=sys.stderr,
                )
        self.control.barrier()

    def _write_files(self, plan: LocalPlan, copies: Copies | None) -> dict[str, Any]:
        """Write this rank's files; return its record, or the reason of a failure."""
        content = plan.content
        folder = plan.temporary / part_name(self.control.node)
        try:
            if plan.folder_error is not None:
                raise plan.folder_error
            for name, stored in content.small.items():
                write_bytes(folder / name, stored)
            blocks = content.blocks if copies is None else copies.blocks()
            return record_of(content, plan.part, write_kinds(folder, plan.part, blocks, self.control.node))
        except Exception as error:  # after any error the node's first rank still waits for this record
            needed = sum(shard.data.nbytes for of_kind in content.blocks.values() for shard in of_kind)
            reason = f"{type(error).__name__}: {error}{room_left(error, folder, needed)}"
            return {"failure": f"rank {self.control.rank}: {reason}"}

    def _complete(self, plan: LocalPlan, records: Sequence[dict[str, Any]]) -> LocalCheckpoint:
        """Write the manifest of this node's part."""
        folder = plan.temporary / part_name(self.control.node)
        files = {name: File(**file) for record in records for name, file in record["files"].items()}
        chunks = tuple(chunk_of(values) for record in records for values in record["chunks"])
        manifest = CheckpointManifest(plan.content.meta, files, chunks)
        write_bytes(folder / FILE, to_bytes(manifest))
        sync(folder)
        return LocalCheckpoint(folder, manifest)

    def _exchange(self, plan: LocalPlan, part: LocalCheckpoint | None) -> list[str]:
        """Send this node's part to the next node, and receive the part of the node before; return the faults.

        A node without a part sends nothing.
        """
        group = self.background
        count = len(group.nodes)
        if group.leaders is None:
            return []
        faults = []
        files = None
        try:
            files = None if part is None else files_of(part)
        except OSError as error:
            faults.append(f"its part can't be read back: {error}")
        listed = group.all_gather_of_leaders(files)
        before = (group.node - 1) % count
        sender = None if part is None or files is None else Sender(part.folder, files)
        copy = plan.temporary / part_name(before)
        receiver = None if listed[before] is None else Receiver(copy, files_in(listed[before]))
        pass_files(group.leaders, sender, group.nodes[(group.node + 1) % count][0], receiver, group.nodes[before][0])
        if sender is not None and sender.fault is not None:
            faults.append(f"its part can't be read back: {sender.fault}")
        if receiver is not None and receiver.fault is not None:
            shutil.rmtree(copy, ignore_errors=True)
            faults.append(f"the copy of another node's part: {receiver.fault}")
        return faults

    def _publish(self, plan: LocalPlan) -> None:
        """Give the step's folder its name. Remove older steps, and later steps that an earlier start has written."""
        target = self.folder / name_of(plan.content.meta.step)
        sync(plan.temporary)
        if target.exists():
            remove(target)
        plan.temporary.rename(target)
        sync(self.folder)
        drop_after(self.folder, plan.content.meta.step)
        keep_newest(self.folder, NUM_KEPT)
