"""Broadcasts one data-parallel rank's micro-batch, so that all data-parallel ranks compute the same micro-batch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.device import compute_device
from hybridtron.parallel.mesh import RankGroup


def same_batch(own: Batch, source: int, ranks: RankGroup) -> Batch:
    """Return the micro-batch of the rank with index `source` in `ranks`. All of these ranks call this together.

    own: this rank's micro-batch, with full rows; micro-batches have equal shapes

    The result is on the CPU, and its rows continue no earlier rows. On a GPU the host waits for the device.
    """
    seq = own.seq
    tensors = [own.tokens_BL, own.labels_BL, own.mask_BL, seq.positions_BL]
    if seq.documents_BL is not None:
        tensors.append(seq.documents_BL)
    assert ranks.group is not None
    packed = torch.stack([tensor.long() for tensor in tensors]).to(compute_device())
    dist.broadcast(packed, dist.get_global_rank(ranks.group, source), group=ranks.group)
    received = [values.to(like.dtype) for values, like in zip(packed.cpu(), tensors, strict=True)]
    tokens_BL, labels_BL, mask_BL, positions_BL, *documents = received
    same = SeqInfo(positions_BL, next(iter(documents), None), carried=False)
    return Batch(tokens_BL, labels_BL, mask_BL, same).with_boundaries()
