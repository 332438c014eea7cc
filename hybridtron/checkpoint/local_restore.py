"""The newest local checkpoint from which all nodes can resume: its parts are verified, and lost parts are fetched.

A node that has no valid copy of its own part gets the part from another node that holds a copy: each such node is
tried. If no copy is valid, the next older local checkpoint is tried. Each reason is printed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtron.checkpoint.folder import step_folders
from hybridtron.checkpoint.local import LocalCheckpoint, part_name, remove
from hybridtron.checkpoint.local_files import Receiver, Sender, files_in, files_of, pass_files
from hybridtron.checkpoint.local_identity import Identity
from hybridtron.checkpoint.manifest import BrokenCheckpoint, name_of
from hybridtron.parallel.control import Control, node_name


@dataclass(frozen=True)
class LocalSave:
    """A local checkpoint, which the nodes hold together.

    holders: index of a part -> the nodes that hold it
    """

    step: int
    save: str
    holders: dict[int, list[int]]


def newest_local(
    folder: Path, control: Control, layout: str, identity: Identity, allowed: Callable[[int], bool]
) -> LocalCheckpoint | None:
    """Return this node's part of the newest local checkpoint that is complete, or None. All ranks call this together.

    `folder` is this node's folder, `identity` has the last usable steps. `allowed` returns True for
    a step from which the run may resume.
    """
    gathered = control.all_gather(_list_parts(folder) if control.leads else None)
    of_nodes = [gathered[ranks[0]] for ranks in control.nodes]
    for listed in of_nodes:
        for fault in listed["faults"]:
            _say(control, fault)
    hosts = [listed["host"] for listed in of_nodes]
    for local_save in _saves(of_nodes, control, layout, identity, allowed):
        reason = _missing(local_save, folder, control, hosts)
        if reason is None:
            return LocalCheckpoint.open(_place(folder, local_save.step, control.node))
        _say(control, f"local checkpoint of step {local_save.step} is not used: {reason}")
    return None


def _say(control: Control, text: str) -> None:
    if control.rank == 0:
        print(f"LOCAL CHECKPOINT: {text}", file=sys.stderr)


def _place(folder: Path, step: int, part: int) -> Path:
    return folder / name_of(step) / part_name(part)


def _list_parts(folder: Path) -> dict[str, Any]:
    """List the parts in a node's folder as plain values.

    The list also has the host, and the faults of a disk that can't be read and of parts that can't be opened.
    """
    parts: list[Any] = []
    faults: list[str] = []
    paths: list[Path] = []
    try:
        for step_folder in step_folders(folder):
            paths += sorted(step_folder.glob("part-*"))
    except OSError as error:  # a broken disk: the other nodes still wait for the list
        faults.append(f"on node {node_name()}: {error}")
    for path in paths:
        try:
            part = LocalCheckpoint.open(path)
            record = part.record
        except (BrokenCheckpoint, OSError) as error:
            faults.append(f"on node {node_name()}: {error}")
            continue
        parts.append([part.meta.step, record.save, record.part, record.nodes, record.layout, record.limits])
    return {"host": node_name(), "parts": parts, "faults": faults}


def _saves(
    of_nodes: Sequence[dict[str, Any]],
    control: Control,
    layout: str,
    identity: Identity,
    allowed: Callable[[int], bool],
) -> list[LocalSave]:
    """Return the usable local checkpoints of which any node has a part, newest first. Say why others are refused."""
    holders: dict[tuple[int, str], dict[int, list[int]]] = {}
    refused: dict[int, str] = {}  # step -> reason
    nodes = [list(ranks) for ranks in control.nodes]
    for node, listed in enumerate(of_nodes):
        for step, save, part, nodes_of_save, layout_of_save, limits in listed["parts"]:
            if not allowed(step):
                continue
            limit = identity.limit_of(step, limits)
            if limit is not None:
                refused[step] = f"a rollback, or silent corruption, has left steps up to {limit}"
            elif layout_of_save != layout:
                refused[step] = f"its layout is {layout_of_save}, but now it is {layout}"
            elif nodes_of_save != nodes:
                refused[step] = "its ranks were divided among nodes in another way"
            else:
                holders.setdefault((step, save), {}).setdefault(part, []).append(node)
    for step, reason in sorted(refused.items()):
        _say(control, f"local checkpoint of step {step} is not used: {reason}")
    return [LocalSave(step, save, holders[step, save]) for step, save in sorted(holders, reverse=True)]


def _missing(local_save: LocalSave, folder: Path, control: Control, hosts: Sequence[str]) -> str | None:
    """Verify all parts and fetch lost ones; return the reason why a part is missing, or None if all are there."""
    holders = local_save.holders
    own_part = _place(folder, local_save.step, control.node)
    faults = _faults(own_part if control.node in holders.get(control.node, ()) else None, control)
    for node in range(len(control.nodes)):
        has_part = node in holders.get(node, ())
        if has_part and faults[node] is None:
            continue
        if has_part:
            _say(control, f"on node {hosts[node]}: {faults[node]}")
        if reason := _fetch_from_any(local_save, node, folder, control, hosts):
            return reason
    return None


def _fetch_from_any(
    local_save: LocalSave, node: int, folder: Path, control: Control, hosts: Sequence[str]
) -> str | None:
    """Fetch a part from the first other node with a valid copy; return why no copy is valid, or None."""
    part = f"the part of node {hosts[node]}"
    own_part = _place(folder, local_save.step, control.node) if control.node == node else None
    reasons: list[str] = []
    for source in [holder for holder in local_save.holders.get(node, ()) if holder != node]:
        reason = _fetch(local_save, node, source, folder, control, hosts)
        if reason is None:
            reason = _faults(own_part, control)[node]
            if reason is None:
                _say(control, f"node {hosts[node]} has its part of step {local_save.step} from node {hosts[source]}")
                return None
            reason = f"the copy on node {hosts[source]} of {part} is damaged: {reason}"
        reasons.append(reason)
    return "; ".join(reasons) or f"no other node has a copy of {part}"


def _faults(part: Path | None, control: Control) -> list[str | None]:
    """Verify each node's part, with all ranks of the node; return the first fault of each node, or None."""
    fault = None
    ranks = control.nodes[control.node]
    if part is not None:
        try:
            fault = LocalCheckpoint.open(part).fault(ranks.index(control.rank), len(ranks))
        except (BrokenCheckpoint, OSError) as error:
            fault = str(error)
    by_rank = control.all_gather(fault)
    return [next((by_rank[rank] for rank in ranks if by_rank[rank]), None) for ranks in control.nodes]


def _fetch(
    local_save: LocalSave, node: int, source: int, folder: Path, control: Control, hosts: Sequence[str]
) -> str | None:
    """Send a part from the node `source` to the node that wrote it; return the reason of a failure, or None."""
    path = _place(folder, local_save.step, node)
    sends = control.leads and control.node == source
    files = None
    if sends:
        with suppress(BrokenCheckpoint, OSError):  # then there are no files to send
            files = files_of(LocalCheckpoint.open(path))
    gathered = control.all_gather(files)
    if gathered[control.nodes[source][0]] is None:
        return f"the copy on node {hosts[source]} of the part of node {hosts[node]} can't be opened"
    sizes = files_in(gathered[control.nodes[source][0]])
    target_rank = control.nodes[node][0]
    source_rank = control.nodes[source][0]
    fault: OSError | None = None
    if sends:
        assert control.leaders is not None
        sender = Sender(path, sizes)
        pass_files(control.leaders, sender, target_rank, None, target_rank)
        fault = sender.fault
    elif control.leads and control.node == node:
        assert control.leaders is not None
        incoming = path.with_name(f".{path.name}")
        shutil.rmtree(incoming, ignore_errors=True)
        receiver = Receiver(incoming, sizes)
        pass_files(control.leaders, None, source_rank, receiver, source_rank)
        fault = receiver.fault or _replace_part(incoming, path)
    reasons = control.all_gather(None if fault is None else f"node {node_name()}: {fault}")
    return next(filter(None, reasons), None)


def _replace_part(incoming: Path, path: Path) -> OSError | None:
    """Replace a part by the part that has arrived; return the error of the disk, or None."""
    try:
        if path.exists():
            remove(path)
        incoming.rename(path)
    except OSError as error:
        return error
    return None
