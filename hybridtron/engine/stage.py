"""Pipeline stages in the form that Megatron's schedules and data parallelism expect.

Functions here build a rank's stages, mark their weights for Megatron, and finish a step's gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from hybridtron.architecture.base import DENSE, LetterOwner, Parameter
from hybridtron.architecture.table import parameter_table
from hybridtron.config.choices import FP8_MULTIPLES, KeptFormat
from hybridtron.config.layout import chunks_on, fp8_layers, shared_homes, stages_of
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch
from hybridtron.device import compute_device, plain_torch
from hybridtron.engine.shared_gradients import SharedGradients
from hybridtron.engine.through_time import Ended, ThroughTime
from hybridtron.model.lm import LanguageModel, ModelOut, ModelSlice, stream_dtype
from hybridtron.model.stack import States
from hybridtron.parallel.fp8 import Fp8
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import TensorGroup, accumulate_in_products
from hybridtron.parallel.mcore import data_parallel_config, schedule_config
from hybridtron.parallel.mesh import RankGroup
from hybridtron.problems import ConfigError, Problem


class Stage(nn.Module):
    """A pipeline stage. It receives the previous stage's stream from Megatron's schedule.

    Megatron reads the attributes that are set here.
    """

    model_type = ModelType.encoder_or_decoder

    def __init__(
        self,
        model: LanguageModel,
        config: TransformerConfig,
        virtual_stage: int | None,
        chunk: int = 0,
        homes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.vp_stage = virtual_stage
        self.pre_process = model.slice.first
        self.post_process = model.slice.last
        self.share_embeddings_and_output_weights = model.tied
        self.received: Tensor | None = None
        self.shared: SharedGradients | None = None  # covers all stages; set on the first stage of a rank
        mark_for_megatron(model, {letter: chunks[0] != chunk for letter, chunks in homes.items()})

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        """Store the received stream. The schedule calls this before each forward pass."""
        self.received = received[0]

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return the tied weight, if it is trained; Megatron sums its gradients over the first and the last stage."""
        if self.model.tied:
            weight = self.model.get_parameter("embedding.weight")
        else:
            weight = None
        if weight is None or not weight.requires_grad:
            return None
        return weight

    def forward(self, batch: Batch, states: States | None, through: ThroughTime | None = None) -> ModelOut | Ended:
        with plain_torch():
            if through is not None:
                return through.run(self.model, batch, states, self.received)
            return self.model(batch.tokens_BL, states, batch.seq, self.received, logits=False)


def mark_for_megatron(model: LanguageModel, copied: Mapping[str, bool]) -> None:
    """Set the attributes that Megatron reads from weights: sharded, a second copy, exempt from weight decay.

    `copied` has the letters whose shared weights several stages hold; the value is True if an earlier stage holds them.
    Megatron sums gradients without `allreduce` over the ranks that hold the same experts, the only family that it knows
    besides the dense one. It takes the other tensor-parallel ranks for copies unless a weight is marked as sharded.
    """
    tensor = model.slice.tensor
    for name, weight in model.named_parameters():
        parameter = model.table[name]
        is_tied = model.tied and name == "embedding.weight"
        letter = parameter.owner.letter if isinstance(parameter.owner, LetterOwner) else None
        cut = parameter.cut_over("tensor", tensor.size)
        dense = parameter.family == DENSE
        marks: dict[str, Any] = {
            "allreduce": dense,
            "tensor_model_parallel": cut is not None or not dense,
            "partition_dim": -1 if cut is None else cut.axis,
            "partition_stride": 1,
            "undecayed": not parameter.decay,
            "partial_over_tensor": cut is None and is_partial(parameter, tensor),
            "shared_embedding": is_tied or letter in copied,
            "shared": (is_tied and not model.slice.first) or (letter is not None and copied.get(letter, False)),
        }
        for mark, value in marks.items():
            setattr(weight, mark, value)


def is_partial(parameter: Parameter, tensor: TensorGroup) -> bool:
    """Check if a replicated weight's gradient covers only this rank's heads or tokens, and so must be summed."""
    partial = parameter.partial_gradient or (tensor.sequence and parameter.sequence_partial)
    return tensor.size > 1 and partial


def build_stages(config: Config, groups: Groups, dtype: torch.dtype, device: torch.device) -> list[Stage]:
    """Build this rank's pipeline stages, uninitialised, in the order of its virtual stages."""
    layers = stages_of(config)
    virtual = config.parallel.virtual_pipeline
    sent = stream_dtype(dtype, config.model.residual_fp32)
    megatron = schedule_config(config.model.width, dtype, sent, config.parallel)
    products = {"fp8": fp8_of(config, groups), "accumulate": config.parallel.gradient_accumulation_fusion}
    tensor = replace(groups.tensor, products=replace(groups.tensor.products, **products))
    homes = shared_homes(config.model, layers)
    stages = []
    for stage, chunk in enumerate(chunks_on(config.parallel, groups.pipeline.rank)):
        place = ModelSlice(layers[chunk], chunk == 0, chunk == len(layers) - 1, tensor, groups.meshes)
        with device:
            model = LanguageModel(config.model, place, config.parallel.recompute, config.parallel.offload)
        stages.append(Stage(model.cast(dtype), megatron, stage if virtual > 1 else None, chunk, homes))
    stages[0].shared = shared_gradients(config, homes, dtype, pipeline=groups.pipeline)
    return stages


def shared_gradients(
    config: Config, letters: Collection[str], dtype: torch.dtype, pipeline: RankGroup
) -> SharedGradients | None:
    """Build the cross-stage reducer for weights that sub-layers of these letters share; None if there are none."""
    table = parameter_table(config.model)
    shared = {
        name: weight
        for name, weight in table.items()
        if isinstance(weight.owner, LetterOwner) and weight.owner.letter in letters
    }
    narrow = KeptFormat.fp32 != config.precision.gradients
    if narrow:
        summed = dtype
    else:
        summed = torch.promote_types(dtype, torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    if not shared:
        return None
    shapes = {name: weight.share_shape(config.parallel.mesh_sizes) for name, weight in shared.items()}
    dtypes = {name: wide if weight.fp32 else summed for name, weight in shared.items()}
    return SharedGradients(shapes, dtypes, pipeline)


def fp8_of(config: Config, groups: Groups) -> Fp8 | None:
    """Return the FP8 settings for the run's large projections; None if they do not use FP8."""
    precision = config.precision
    if precision.name not in FP8_MULTIPLES:
        return None
    # Tensor- and data-parallel ranks see parts of the same weights and of the same step, so they share amax values. The
    # group is passed even if it has one rank: without a group, Transformer Engine would reduce over all processes, also
    # those of other pipeline stages.
    shared = groups.stage.group
    history = precision.history
    layers = fp8_layers(config)
    return Fp8(precision.name, layers, history, precision.emulate, precision.cache_weights, shared)


def data_parallel(
    stages: Sequence[Stage], config: Config, groups: Groups, dtype: torch.dtype
) -> list[DistributedDataParallel]:
    """Wrap initialised stages so that gradients are summed over data-parallel ranks."""
    parallel = config.parallel
    if parallel.overlap_param_gather and parallel.virtual_pipeline > 1 and compute_device().type == "cpu":
        message = "is true, but gloo mixes up what ranks with virtual stages gather ahead: leave it out"
        raise ConfigError([Problem("parallel.overlap_param_gather", "unsupported", message)])
    settings = data_parallel_config(parallel, config.precision.gradients, dtype)
    wrapped = [
        DistributedDataParallel(stage.config, settings, stage, disable_bucketing=index > 0)
        for index, stage in enumerate(stages)
    ]
    if parallel.gradient_accumulation_fusion:
        for stage in stages:
            accumulate_in_products(stage)
    stages[0].config.finalize_model_grads_func = partial(finalize_gradients, groups)
    if parallel.overlap_grad_reduce:
        no_sync: Any = [chunk.no_sync for chunk in wrapped]
        if len(wrapped) > 1:
            stages[0].config.no_sync_func = no_sync
        else:
            stages[0].config.no_sync_func = no_sync[0]
    return wrapped


def finalize_gradients(
    groups: Groups,
    stages: list[Any],
    tokens: Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> None:
    """Finish a step's gradients; Megatron calls this after the last micro-batch.

    Megatron sums over data-parallel ranks and both copies of a tied embedding. Then shared weights are summed over
    stages, everything is divided by the number of loss tokens, and replicated weights whose gradient covers only a
    tensor rank's own heads or tokens are summed over tensor ranks.
    """
    finalize_model_grads(stages, None, pg_collection, force_all_reduce)
    if (shared := stages[0].module.shared) is not None:
        weights = {name: weight for stage in stages for name, weight in stage.module.model.named_parameters()}
        shared.sum_over_stages(weights, compute_device())
    if tokens is not None:
        _divide(stages, tokens, groups)
    trained = (w for stage in stages for w in stage.parameters() if w.requires_grad)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for weight in trained:
        if weight.partial_over_tensor:
            by_dtype.setdefault(weight.main_grad.dtype, []).append(weight.main_grad)
    for gradients in by_dtype.values():
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=groups.tensor.group)
        for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(summed)


def _divide(stages: Sequence[Any], tokens: Tensor, groups: Groups) -> None:
    """Divide by the loss tokens of all ranks, which the last stage counts. Megatron's division would synchronize."""
    assert groups.pipeline.group is not None
    *_, last = dist.get_process_group_ranks(groups.pipeline.group)
    dist.broadcast(tokens, src=last, group=groups.pipeline.group)
    dist.all_reduce(tokens, group=groups.dense.copies.group)
    share = torch.where(tokens > 0, 1.0 / tokens, 1.0)
    for stage in stages:
        stage.scale_gradients(share)
