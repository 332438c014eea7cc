"""A model's folder as the Hugging Face Hub has it: shards of safetensors with an index, small files beside them.

Which tensor stands where is known before one is read; they are then made, written and forgotten one at a time.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridtron.checkpoint.files import bytes_of, prefetched, sync_file
from hybridtron.interop.rules import TensorRule

INDEX = "model.safetensors.index.json"
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written, and its type."""

    rule: TensorRule
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.rule.shape) * self.dtype.itemsize


def shards_of(tensors: Sequence[Planned], largest: int) -> list[list[Planned]]:
    """In order, as many into each shard as fit, at least one."""
    shards: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.size > room:
            shards.append([])
            room = largest
        shards[-1].append(tensor)
        room -= tensor.size
    return shards


def write_weights(
    folder: Path,
    tensors: Sequence[Planned],
    largest: int,
    made: Callable[[TensorRule], Tensor],
    progress: Callable[[int, int], None],
) -> None:
    """All tensors, and the index where there is more than one shard."""
    shards = shards_of(tensors, largest)
    total, done, where = sum(tensor.size for tensor in tensors), 0, {}
    values = prefetched(made(tensor.rule).to(tensor.dtype) for tensor in itertools.chain(*shards))
    with ThreadPoolExecutor(1) as thread:
        flushed = []
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            with (folder / name).open("wb") as file:
                file.write(_head(shard))
                for tensor, value in zip(shard, values, strict=False):
                    file.write(bytes_of(value))
                    where[tensor.rule.theirs] = name
                    done += tensor.size
                    progress(done, total)
            flushed.append(thread.submit(sync_file, folder / name))
        for one in flushed:
            one.result()
    if len(shards) > 1:
        parameters = sum(math.prod(tensor.rule.shape) for tensor in tensors)
        write_json(
            folder / INDEX,
            {
                "metadata": {"total_parameters": parameters, "total_size": total},
                "weight_map": dict(sorted(where.items())),
            },
        )


def write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _head(shard: Sequence[Planned]) -> bytes:
    """The head of a safetensors file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        start, end = end, end + tensor.size
        shape = list(tensor.rule.shape)
        entries[tensor.rule.theirs] = {"dtype": TYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
