"""Files that the ranks of a node write together: each rank writes its part at a known position.

    model-00003.safetensors   the tensors that the ranks of node 3 write, in the order of these ranks
    list-00003                the records of node 3's ranks: each lists the tensors that a rank has written, with their
                              digests; rank 0 reads the records, and removes the file at the end

So the number of files does not grow with the number of ranks on a node. Before the ranks of a node write, they exchange
the names and shapes of their tensors. From these each rank computes the same head and the same positions. A record has
a fixed place, too: only the digests in it are unknown before the tensors are written.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridtron.checkpoint.files import TensorInfo, head_of_infos, infos_of, plan_chunks, size_of, write_part
from hybridtron.checkpoint.manifest import File, StoredShard
from hybridtron.parallel.control import Control
from hybridtron.storage.digest import digest_of
from hybridtron.storage.durable import writing

MIN_ROOM = 4096  # smallest size of a record in bytes; the reason of a failure must fit
DIGEST_BYTES = 32
WRITERS = 2  # threads: one digests while the other flushes to disk


@dataclass(frozen=True)
class NodePart:
    """This rank's part of its node's files for one checkpoint.

    chunks: kind of file (`model`, `optimizer`, ...) -> the chunks that this rank writes, without their digests
    heads: kind of file -> the file's head; empty except on the node's first rank, which writes the heads
    files: name of a file -> its entry for the manifest; empty except on the node's first rank
    """

    chunks: Mapping[str, Sequence[StoredShard]]
    heads: Mapping[str, bytes]
    files: Mapping[str, File]

    @property
    def kinds(self) -> list[str]:
        """The kinds of files into which this rank writes."""
        return sorted({*self.heads, *self.chunks})


def file_name(kind: str, node: int) -> str:
    return f"{kind}-{node:05}.safetensors"


def plan_part(blocks: Mapping[str, Sequence[Any]], control: Control) -> NodePart:
    """Plan this rank's part of its node's files. All ranks of a node call this together.

    `blocks` maps each kind of file to the blocks (`ShardedTensor`s) that this rank writes.
    """
    own_infos = {kind: infos_of(of_kind) for kind, of_kind in blocks.items() if of_kind}
    of_ranks = control.all_gather_on_node(own_infos)
    index = control.nodes[control.node].index(control.rank)
    chunks: dict[str, list[StoredShard]] = {}
    heads: dict[str, bytes] = {}
    files: dict[str, File] = {}
    for kind in sorted({kind for of_rank in of_ranks for kind in of_rank}):
        parts = [[TensorInfo(*info) for info in of_rank.get(kind, [])] for of_rank in of_ranks]
        head = head_of_infos(itertools.chain.from_iterable(parts))
        starts = list(itertools.accumulate(map(size_of, parts), initial=len(head)))
        name = file_name(kind, control.node)
        if own_infos.get(kind):
            chunks[kind] = plan_chunks(name, blocks[kind], starts[index])
        if index == 0:
            heads[kind] = head
            files[name] = File(starts[-1], len(head), digest_of(head))
    return NodePart(chunks, heads, files)


def distinct_on_node(blocks: Mapping[str, Sequence[Any]], control: Control) -> dict[str, list[Any]]:
    """Return this rank's blocks that no lower rank on its node holds. All ranks of a node call this together."""
    names = {kind: [[name, shape] for name, _, shape in infos_of(of_kind)] for kind, of_kind in blocks.items()}
    of_ranks = control.all_gather_on_node(names)
    index = control.nodes[control.node].index(control.rank)
    distinct = {}
    for kind, of_kind in blocks.items():
        earlier = {(name, *shape) for of_rank in of_ranks[:index] for name, shape in of_rank.get(kind, [])}
        own_names = [(name, *shape) for name, shape in names[kind]]
        distinct[kind] = [entry for entry, name in zip(of_kind, own_names, strict=True) if name not in earlier]
    return distinct


def write_kinds(
    folder: Path, part: NodePart, blocks: Mapping[str, Sequence[Any]], node: int
) -> dict[str, list[StoredShard]]:
    """Write this rank's part of each file in a folder; return the written chunks with their digests, by kind."""

    def write(kind: str) -> list[StoredShard]:
        path = folder / file_name(kind, node)
        return write_part(path, blocks.get(kind, ()), part.chunks.get(kind, ()), part.heads.get(kind, b""))

    with ThreadPoolExecutor(WRITERS) as threads:
        return dict(zip(part.kinds, threads.map(write, part.kinds), strict=True))


@dataclass(frozen=True)
class Records:
    """Places of all ranks' records in the files `list-...` of a checkpoint that is being written.

    nodes: the global ranks of each node
    rooms: bytes of each rank's record, by rank
    """

    nodes: Sequence[Sequence[int]]
    rooms: Sequence[int]

    def put(self, folder: Path, rank: int, values: Mapping[str, Any]) -> None:
        """Write a rank's record and wait until it is on disk."""
        name, start, room = self._places[rank]
        body = json.dumps(values).encode().ljust(room - DIGEST_BYTES)
        assert len(body) == room - DIGEST_BYTES, "a record was planned with less room than it needs"
        with writing(folder / name, start) as write:
            write(memoryview(digest_of(body).encode() + body))

    def reserve(self, folder: Path, rank: int) -> None:
        """Write zeros at the place of a rank's record, so that the record still fits if the disk becomes full.

        This helps only on file systems that overwrite a block in its place.
        """
        name, start, room = self._places[rank]
        with writing(folder / name, start) as write:
            write(memoryview(bytes(room)))

    def read(self, folder: Path, rank: int) -> dict[str, Any] | None:
        """Read a rank's record; return None as long as the rank has not written all of it."""
        name, start, room = self._places[rank]
        try:
            with (folder / name).open("rb") as file:
                file.seek(start)
                stored = file.read(room)
        except FileNotFoundError:
            return None
        body = stored[DIGEST_BYTES:]
        if len(stored) < room or stored[:DIGEST_BYTES] != digest_of(body).encode():
            return None
        return json.loads(body)

    @cached_property
    def _places(self) -> dict[int, tuple[str, int, int]]:
        """The place of each rank's record: the file's name, the position in the file, and the record's size."""
        ranks = sorted(itertools.chain.from_iterable(self.nodes))
        rooms = dict(zip(ranks, self.rooms, strict=True))
        places = {}
        for node, of_node in enumerate(self.nodes):
            start = 0
            for rank in of_node:
                places[rank] = (f"list-{node:05}", start, rooms[rank])
                start += rooms[rank]
        return places


def room_for(values: Mapping[str, Any]) -> int:
    """Return the size in bytes of a record with these values. `NO_DIGEST` may stand for digests in the values."""
    return max(MIN_ROOM, DIGEST_BYTES + len(json.dumps(values).encode()))


def failure_record(reason: str) -> dict[str, str]:
    """Return the record of a rank that could not write its part. A long reason is cut, so that it fits every record."""
    ascii_only = reason.encode("ascii", "backslashreplace").decode("ascii")
    return {"failure": ascii_only[: MIN_ROOM // 8]}
