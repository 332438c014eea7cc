"""Inference over tensor- and pipeline-parallel ranks: every rank gets the same logits and losses.

All ranks read the same tokens, unless context-parallel ranks divide the tokens (`context_reader.py`). Each pipeline
stage sends the residual stream to the next stage. The last stage broadcasts the requested result, so that every rank
chooses the same next token without further communication. Stages compute one after another. In generation their work
can't overlap, because the first stage needs the new token, which follows from the last stage's result.

Legend: B rows (sequences), L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtron.architecture.table import Architecture
from hybridtron.config.pipeline_layout import chunks_on, stage_layers
from hybridtron.config.schema import ParallelConfig
from hybridtron.data.batch import SeqInfo
from hybridtron.device import compute_device
from hybridtron.inference.context_reader import context_reader
from hybridtron.inference.reader import Reader, Readout, reader
from hybridtron.model.lm import LanguageModel, ModelSlice, stream_dtype
from hybridtron.model.stack import States
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import MEGATRON
from hybridtron.parallel.mesh import ONE_RANK
from hybridtron.parallel.plain_values import all_gather_tensors

SEQ_LEN = 2048  # sequence length for which stages are balanced by cost; inputs may have any length


def build_parts(
    arch: Architecture, parallel: ParallelConfig, groups: Groups, dtype: torch.dtype
) -> list[LanguageModel]:
    """Build the pipeline stages that this rank computes, with uninitialised weights in `dtype`."""
    layers = stage_layers(arch, parallel, SEQ_LEN)  # the sub-layers of every stage
    slices = [
        ModelSlice(layers[index], index == 0, index == len(layers) - 1, groups.tensor, groups.meshes)
        for index in chunks_on(parallel, groups.pipeline.rank)
    ]
    return [LanguageModel(arch, stage).to(compute_device()).cast(dtype).eval() for stage in slices]


def staged_reader(parts: Sequence[LanguageModel], groups: Groups, dtype: torch.dtype) -> Reader:
    """Return a reader for a model that is divided over pipeline ranks. All these ranks must call the reader together.

    `parts` are the stages that this rank computes.
    """
    arch = parts[0].arch
    model = arch.model
    pipeline = groups.pipeline.group
    assert pipeline is not None
    ranks = dist.get_process_group_ranks(pipeline)
    previous_rank, next_rank = (ranks[(groups.pipeline.rank + step) % len(ranks)] for step in (-1, 1))
    stream_type = stream_dtype(dtype, model.residual_fp32)
    device = compute_device()

    def forward(tokens_BL: Tensor, states: States | None, seq: SeqInfo, readout: Readout) -> tuple[Tensor, States]:
        batch, length = tokens_BL.shape
        result = torch.empty(readout.shape, dtype=readout.dtype, device=device)
        new: States = {}
        for part in parts:
            x_LBD = None
            if not part.slice.first:
                tokens = length * (2 if part.carries_embedding else 1)
                x_LBD = torch.empty(tokens, batch, model.width, dtype=stream_type, device=device)
                dist.recv(x_LBD, previous_rank)
            out = part(tokens_BL, states, seq, x_LBD, logits=False)
            new |= out.states
            if part.slice.last:
                result = readout.make(part, out.output).contiguous()
            else:
                dist.send(out.output.contiguous(), next_rank)
        dist.broadcast(result, ranks[-1], group=pipeline)
        return result, new

    gather = partial(gather_layers, groups=groups)
    inner = Reader(forward, parts, model.vocab_size, dtype, device, gather)
    return context_reader(inner, arch.chunk_multiple, groups.context)


def training_reader(trained: Sequence[LanguageModel], groups: Groups, dtype: torch.dtype) -> Reader:
    """Return a reader that shares the weights of a model in training. All ranks must call the reader together.

    `trained` are the stages that this rank trains. The reader uses neither sequence parallelism nor FP8 nor Transformer
    Engine, so that inputs may have any length. If ranks divide the experts, all ranks read the same tokens.
    """
    ranks = replace(groups.tensor.expert_ranks, same_tokens=True)
    tensor = replace(groups.tensor, sequence=False, backend=MEGATRON, experts=ranks)
    context = groups.context
    if ranks.expert.size > 1:
        context = ONE_RANK  # context-parallel ranks read all tokens too
    parts = []
    for training_part in trained:
        with torch.device("meta"):
            part = LanguageModel(training_part.arch, replace(training_part.slice, tensor=tensor))
        for name, weight in training_part.named_parameters():
            layer, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(layer), leaf, nn.Parameter(weight.detach(), requires_grad=False))
        parts.append(part.eval())
    whole = groups.tensor.size == groups.pipeline.size == ranks.expert.size == 1
    if whole:
        return context_reader(reader(parts[0]), parts[0].arch.chunk_multiple, context)
    return staged_reader(parts, replace(groups, context=context), dtype)


def gather_layers(by_layer: dict[int, Tensor], groups: Groups) -> dict[int, Tensor]:
    """Gather this rank's results by layer; return the results of all layers, in order, on every rank.

    Tensor-parallel ranks divide the first axis of a result: heads or channels. Pipeline ranks divide the layers.
    """
    shards = all_gather_tensors({str(layer): values for layer, values in by_layer.items()}, groups.tensor.group)
    stage_results = {str(layer): torch.cat([shard[str(layer)] for shard in shards]) for layer in by_layer}
    by_stage = all_gather_tensors(stage_results, groups.pipeline.group)
    stages = {int(layer): values for stage in by_stage for layer, values in stage.items()}
    return {layer: stages[layer] for layer in sorted(stages)}
