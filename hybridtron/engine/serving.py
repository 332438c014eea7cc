"""Inference over tensor- and pipeline-parallel ranks: every rank gets the same logits and losses.

All ranks read the same tokens, unless context-parallel ranks divide them (`shared_reading.py`). The stream passes from
stage to stage, and the last stage broadcasts the requested result, so that every rank chooses the same next token
without a further message. Stages compute one at a time, without a schedule: the next token depends on the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.layout import chunks_on, stage_layers
from hybridtron.config.schema import ParallelConfig
from hybridtron.data.batch import SeqInfo
from hybridtron.device import compute_device
from hybridtron.engine.shared_reading import among_shares
from hybridtron.model.generate import Finish, Reader, reader
from hybridtron.model.lm import LanguageModel, ModelSlice, stream_dtype
from hybridtron.model.stack import States
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import MEGATRON
from hybridtron.parallel.plain_values import all_gather_tensors

SEQ_LEN = 2048  # sequence length at which stages are balanced by cost, for inputs of any length


def slices(model: ModelConfig, parallel: ParallelConfig, groups: Groups, dtype: torch.dtype) -> list[LanguageModel]:
    """Build the stages that this rank computes, with uninitialised weights."""
    layers = stage_layers(model, parallel, SEQ_LEN)
    places = [
        ModelSlice(layers[chunk], chunk == 0, chunk == len(layers) - 1, groups.tensor, groups.meshes)
        for chunk in chunks_on(parallel, groups.pipeline.rank)
    ]
    return [LanguageModel(model, place).to(compute_device()).cast(dtype).eval() for place in places]


def staged_reader(parts: Sequence[LanguageModel], model: ModelConfig, groups: Groups, dtype: torch.dtype) -> Reader:
    """Return a reader over the model's pipeline ranks, which must call it together."""
    pipeline = groups.pipeline.group
    assert pipeline is not None
    ranks = dist.get_process_group_ranks(pipeline)
    before, after = (ranks[(groups.pipeline.rank + step) % len(ranks)] for step in (-1, 1))
    sent = stream_dtype(dtype, model.residual_fp32)
    device = compute_device()

    def forward(tokens_BL: Tensor, states: States | None, seq: SeqInfo, wanted: Finish) -> tuple[Tensor, States]:
        batch, length = tokens_BL.shape
        result = torch.empty(wanted.shape, dtype=wanted.dtype, device=device)
        new: States = {}
        for part in parts:
            x_LBD = None
            if not part.slice.first:
                rows = length * (2 if part.carries_embedding else 1)
                x_LBD = torch.empty(rows, batch, model.width, dtype=sent, device=device)
                dist.recv(x_LBD, before)
            out = part(tokens_BL, states, seq, x_LBD, logits=False)
            new |= out.states
            if part.slice.last:
                result = wanted.make(part, out.output).contiguous()
            else:
                dist.send(out.output.contiguous(), after)
        dist.broadcast(result, ranks[-1], group=pipeline)
        return result, new

    gather_layers = partial(of_all, groups=groups)
    return among_shares(Reader(forward, parts, model.vocab_size, dtype, device, gather_layers), model, groups.context)


def shared_reader(trained: Sequence[LanguageModel], model: ModelConfig, groups: Groups, dtype: torch.dtype) -> Reader:
    """Return a reader that shares a training model's weights. All ranks must call this together.

    Every rank has a row's full tokens and uses plain products, so the length need not be divisible as in training.
    """
    tensor = replace(groups.tensor, sequence=False, products=MEGATRON)
    parts = []
    for training_part in trained:
        with torch.device("meta"):
            part = LanguageModel(model, replace(training_part.slice, tensor=tensor))
        for name, weight in training_part.named_parameters():
            layer, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(layer), leaf, nn.Parameter(weight.detach(), requires_grad=False))
        parts.append(part.eval())
    whole = groups.tensor.size == groups.pipeline.size == 1
    if whole:
        return among_shares(reader(parts[0]), model, groups.context)
    return staged_reader(parts, model, groups, dtype)


def of_all(of_layers: dict[int, Tensor], groups: Groups) -> dict[int, Tensor]:
    """Gather per-layer results over tensor and pipeline ranks: heads or channels in order, and layers in order."""
    shares = all_gather_tensors({str(layer): values for layer, values in of_layers.items()}, groups.tensor.group)
    stage_results = {str(layer): torch.cat([share[str(layer)] for share in shares]) for layer in of_layers}
    of_stages = all_gather_tensors(stage_results, groups.pipeline.group)
    stages = {int(layer): values for stage in of_stages for layer, values in stage.items()}
    return {layer: stages[layer] for layer in sorted(stages)}
