"""Content of a checkpoint: the tensor shards and small files that a process writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridtron.checkpoint.manifest import File, Meta, StoredShard
from hybridtron.checkpoint.node_files import NodePart, distinct_on_node
from hybridtron.config.load import to_yaml
from hybridtron.device import random_states
from hybridtron.engine.engine import Engine
from hybridtron.parallel.blocks import block
from hybridtron.storage.digest import digest_of


@dataclass(frozen=True)
class Content:
    """One process's part of a checkpoint.

    blocks: kind of file (`model`, `optimizer`, `states`, ...) -> tensor shards (`ShardedTensor`s)
    small: file's name -> content, for the files without tensors; empty if another process writes these files
    keys: keys of all tensors of which this process holds a shard, whether it writes the shard or not
    """

    meta: Meta
    blocks: Mapping[str, Sequence[Any]]
    small: dict[str, bytes]
    keys: Sequence[str]


def record_of(content: Content, part: NodePart, chunks: Mapping[str, Sequence[StoredShard]]) -> dict[str, Any]:
    """Return a process's record for the manifest: the entries of its files and chunks, and the keys of its tensors."""
    small = {name: File(len(stored), len(stored), digest_of(stored)) for name, stored in content.small.items()}
    files = {name: asdict(file) for name, file in {**small, **part.files}.items()}
    return {"files": files, "chunks": [chunk for of_kind in chunks.values() for chunk in of_kind], "keys": content.keys}


def content_of(engine: Engine, meta: Meta, tokenizer: Path) -> Content:
    """Collect the tensor shards and small files that this process writes.

    If several processes have the same shard, only one of them writes it.
    """
    shards = _held(engine)
    blocks = {kind: [shard for shard in of_kind if shard.replica_id == 0] for kind, of_kind in shards.items()}
    return Content(meta, blocks, _small(engine, tokenizer, engine.groups.is_first), _keys(shards))


def content_of_node(engine: Engine, meta: Meta, tokenizer: Path) -> Content:
    """Collect the tensor shards and small files that this process writes into its node's part.

    If several processes of a node have the same shard, only one of them writes it. All processes call this together.
    """
    control = engine.groups.control
    shards = _held(engine)
    return Content(meta, distinct_on_node(shards, control), _small(engine, tokenizer, control.leads), _keys(shards))


def _held(engine: Engine) -> dict[str, list[Any]]:
    """Return all tensor shards of this process, by kind of file."""
    shards = engine.blocks()
    rank = engine.groups.rank
    random = [
        block(f"random.{rank}.{name}", tuple(state.shape), (0,) * state.dim(), state, main=True)
        for name, state in random_states().items()
    ]
    return {**shards, "random": random}


def _keys(shards: Mapping[str, Sequence[Any]]) -> list[str]:
    return sorted({shard.key for kind, of_kind in shards.items() for shard in of_kind if kind != "random"})


def _small(engine: Engine, tokenizer: Path, writes: bool) -> dict[str, bytes]:
    """Return the files without tensors; an empty dictionary unless this process `writes` them."""
    if not writes:
        return {}
    return {"config.yaml": to_yaml(engine.config).encode(), "tokenizer.json": tokenizer.read_bytes()}
