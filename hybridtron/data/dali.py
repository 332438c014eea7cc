"""`data.feed=dali`: an NVIDIA DALI pipeline that computes batches from token rows on the GPU.

The batches equal those that `rows.batch_of` computes on the CPU. The pipeline copies tokens to the GPU in their stored
dtype (uint16 or uint32), and computes inputs, labels, mask and positions there. `loader.py` reads the rows and decides
which rows a step has, so checkpoints store no state of DALI. On a machine without a GPU the same pipeline runs on the
CPU.

Suffixes in tensor names give the axes: B rows, L input tokens in a row, T = L + 1 tokens including the last label.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hybridtron.config.schema import Documents
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.data.rows import RowArrays
from hybridtron.device import compute_device

QUEUE_DEPTH = 2  # batches that DALI computes ahead


def dali_batches(steps: Iterator[RowArrays], documents: Documents) -> Iterator[Batch]:
    """Yield each step's batch on the device, computed from the step's rows."""
    first = next(steps, None)
    if first is None:
        return
    pipeline = _pipeline(itertools.chain([first], steps), *first.documents_BT.shape)
    pipeline.build()
    while True:
        try:
            tensors = [torch.from_dlpack(output.as_tensor()) for output in pipeline.run()]
        except StopIteration:  # DALI's signal that its source has ended
            return
        tokens_BL, labels_BL, mask_BL, positions_BL, documents_BL, continues_B = tensors
        seq = SeqInfo(positions_BL, documents_BL if documents is Documents.isolate else None)
        yield Batch(tokens_BL, labels_BL, mask_BL, seq, continues_B)


def _pipeline(steps: Iterator[RowArrays], rows: int, length: int) -> Any:
    """Build the pipeline that computes a batch's tensors from `RowArrays`.

    DALI treats each row as one sample, so a slice such as `tokens[:-1]` is along the sequence.

    length: T, the number of tokens in a row
    """
    fn = importlib.import_module("nvidia.dali.fn")
    types = importlib.import_module("nvidia.dali.types")
    device = compute_device()
    on_gpu = device.type == "cuda"
    pipeline = importlib.import_module("nvidia.dali.pipeline").Pipeline(
        batch_size=rows, num_threads=1, device_id=device.index if on_gpu else None, prefetch_queue_depth=QUEUE_DEPTH
    )
    with pipeline:
        inputs = fn.external_source(source=steps, num_outputs=len(RowArrays._fields), batch=True)
        if on_gpu:
            tokens, documents, base, learned, continues = (array.gpu() for array in inputs)
        else:
            tokens, documents, base, learned, continues = inputs
        tokens = fn.cast(tokens, dtype=types.INT64)
        indices = types.Constant(np.arange(length - 1, dtype=np.int64), device="gpu" if on_gpu else "cpu")
        positions = fn.cast(base[:-1], dtype=types.INT64) + indices
        mask = (documents[:-1] == documents[1:]) & learned[1:]
        pipeline.set_outputs(tokens[:-1], tokens[1:], mask, positions, documents[:-1], continues)
    return pipeline
