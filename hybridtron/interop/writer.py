"""Writes the weights of an exported model folder as safetensors shards with an index, and JSON files.

Shapes and dtypes of all tensors are known before a tensor is read, so each file's head can be written first. Then one
tensor after another is converted, written and freed, so that memory does not grow with the model's size. A thread
prepares the next tensor while a tensor is written.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridtron.checkpoint.files import bytes_of, head_of, in_parts
from hybridtron.data.workers import prefetched
from hybridtron.interop.rules import TensorRule
from hybridtron.storage.durable import writing

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Planned:
    """A tensor to write: its conversion rule, and its dtype in the file."""

    rule: TensorRule
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.rule.shape) * self.dtype.itemsize


def write_weights(
    folder: Path,
    tensors: Sequence[Planned],
    largest: int,
    make: Callable[[TensorRule], Tensor],
    progress: Callable[[int, int], None],
) -> None:
    """Write all tensors in shards, and an index if there are several shards.

    largest: maximum size of a shard in bytes; a larger tensor gets a shard of its own
    make: builds a tensor by its rule
    progress: called after each tensor with two byte counts: written so far, and in total
    """
    shards = in_parts(tensors, lambda tensor: tensor.size, largest)
    total = sum(tensor.size for tensor in tensors)
    done = 0
    files_by_tensor = {}
    values = prefetched(make(tensor.rule).to(tensor.dtype) for tensor in itertools.chain(*shards))
    for number, shard in enumerate(shards, 1):
        if len(shards) == 1:
            name = "model.safetensors"
        else:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with writing(folder / name) as write:
            write(memoryview(head_of(((t.rule.theirs, t.dtype, t.rule.shape) for t in shard), {"format": "pt"})))
            for tensor, value in zip(shard, values, strict=False):
                write(bytes_of(value))
                files_by_tensor[tensor.rule.theirs] = name
                done += tensor.size
                progress(done, total)
    if len(shards) > 1:
        parameters = sum(math.prod(tensor.rule.shape) for tensor in tensors)
        write_json(
            folder / INDEX,
            {
                "metadata": {"total_parameters": parameters, "total_size": total},
                "weight_map": dict(sorted(files_by_tensor.items())),
            },
        )


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write an indented JSON object with sorted keys."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
