"""A model that only reads, cut over tensor- and pipeline-parallel ranks: the same logits on every rank.

All ranks read the same tokens. The stream passes from stage to stage, and the last one sends the logits to all; so each
chooses the same token, and none waits for another's choice. There is no schedule: one stage computes at a time, as a
token's successor is not known before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.layout import chunks_on, stage_layers
from hybridtron.config.schema import ParallelConfig
from hybridtron.data.batch import SeqInfo
from hybridtron.device import compute_device
from hybridtron.model.generate import Reader
from hybridtron.model.lm import LanguageModel, ModelSlice, stream_dtype
from hybridtron.model.stack import States
from hybridtron.parallel.groups import Groups

SEQ_LEN = 2048  # by whose costs the layers are shared out over stages, whatever is read


def slices(model: ModelConfig, parallel: ParallelConfig, groups: Groups, dtype: torch.dtype) -> list[LanguageModel]:
    """The parts of the model that this rank computes, their weights not yet filled."""
    layers = stage_layers(model, parallel, SEQ_LEN)
    places = [
        ModelSlice(layers[chunk], chunk == 0, chunk == len(layers) - 1, groups.tensor)
        for chunk in chunks_on(parallel, groups.pipeline_rank)
    ]
    return [LanguageModel(model, place).to(compute_device()).cast(dtype).eval() for place in places]


def staged_reader(parts: Sequence[LanguageModel], model: ModelConfig, groups: Groups, dtype: torch.dtype) -> Reader:
    """Reads with all ranks of the model, which call it together."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(pipeline)
    before, after = (ranks[(groups.pipeline_rank + step) % len(ranks)] for step in (-1, 1))
    sent = stream_dtype(dtype, model.residual_fp32)
    device = compute_device()

    def read(tokens_BL: Tensor, states: States | None, seq: SeqInfo) -> tuple[Tensor, States]:
        batch, length = tokens_BL.shape
        logits_BV = torch.empty(batch, model.vocab_size, dtype=dtype, device=device)
        new: States = {}
        for part in parts:
            x_LBD = None
            if not part.slice.first:
                x_LBD = torch.empty(length, batch, model.width, dtype=sent, device=device)
                dist.recv(x_LBD, before)
            out = part(tokens_BL, states, seq, x_LBD, logits=False)
            new |= out.states
            if part.slice.last:
                logits_BV = part.next_logits(out.output)
            else:
                dist.send(out.output.contiguous(), after)
        dist.broadcast(logits_BV, ranks[-1], group=pipeline)
        return logits_BV, new

    return Reader(read)
