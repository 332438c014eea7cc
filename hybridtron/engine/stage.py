"""Pipeline stages with the interface that Megatron's schedules and data parallelism expect.

Functions here build a rank's stages, set the weight attributes that Megatron reads, and reduce gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from hybridtron.architecture.table import Architecture
from hybridtron.config.choices import FP8_MULTIPLES, KeptFormat
from hybridtron.config.pipeline_layout import chunks_on, fp8_layers, shared_homes, stages_of
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch
from hybridtron.device import Stopwatch, compute_device, plain_torch
from hybridtron.engine.bptt import MultiChunkForward, StageOutput
from hybridtron.model.lm import LanguageModel, ModelOut, ModelSlice, stream_dtype
from hybridtron.model.stack import States
from hybridtron.ops.product.sums import SUMS_WIDER
from hybridtron.parallel.fp8 import Fp8
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import TensorGroup, mark_fused_accumulation
from hybridtron.parallel.mcore import data_parallel_config, schedule_config
from hybridtron.parallel.mesh import RankGroup
from hybridtron.parallel.small_gradients import add_small_gradients_together
from hybridtron.problems import ConfigError, Problem


@dataclass
class SharedGradients:
    """Gradients for weights that sub-layers on several pipeline stages share.

    A letter in the layer pattern can stand for sub-layers that share weights. Each stage with such a sub-layer has a
    copy of these weights. The copies start equal. They stay equal because their gradients are reduced first over the
    data-parallel ranks, then over the pipeline ranks. With the distributed optimizer, a data-parallel rank updates only
    some elements of a weight, and these must be the same elements on every stage. Therefore these weights have separate
    gradient buckets.

    shapes: name of a shared weight -> shape of a rank's shard
    dtypes: name of a shared weight -> dtype of its gradient
    pipeline: the ranks in this rank's pipeline
    learning: names of the trained weights; None before the first step
    """

    shapes: Mapping[str, Sequence[int]]
    dtypes: Mapping[str, torch.dtype]
    pipeline: RankGroup
    learning: list[str] | None = field(default=None, init=False)

    def sum_over_stages(self, weights: Mapping[str, Any], device: torch.device) -> None:
        """All-reduce the shared gradients over the pipeline ranks, which must all call this method together.

        weights: name -> weight, for all weights on this rank. For a shared weight that is not among them, the rank
            contributes zeros.
        """
        group = self.pipeline.group
        if self.learning is None:
            flags = [name in weights and weights[name].requires_grad for name in self.shapes]
            learns = torch.tensor(flags, dtype=torch.int32, device=device)
            dist.all_reduce(learns, op=dist.ReduceOp.MAX, group=group)
            self.learning = [name for name, is_trained in zip(self.shapes, learns.tolist(), strict=True) if is_trained]
        for dtype in dict.fromkeys(self.dtypes[name] for name in self.learning):
            names = [name for name in self.learning if self.dtypes[name] == dtype]
            gradients: list[Tensor] = [
                weights[name].main_grad
                if name in weights
                else torch.zeros(tuple(self.shapes[name]), dtype=dtype, device=device)
                for name in names
            ]
            flat = _flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=group)
            for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(summed)


class Stage(nn.Module):
    """A pipeline stage, with the attributes that Megatron reads.

    model: the stage's part of the model
    virtual_stage: the stage's index among this rank's virtual stages; None without virtual stages
    chunk: the stage's number in the model
    homes: letter whose weights several stages share -> these stages' numbers in the model
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
        self.shared: SharedGradients | None = None  # of all stages on the rank; set only on its first stage
        mark_for_megatron(model, {letter: chunks[0] != chunk for letter, chunks in homes.items()})

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        """Store the previous stage's output. Megatron's schedule calls this method before each forward pass."""
        self.received = received[0]

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return the weight that embedding and head share, or None if there is no such weight or it is frozen.

        Megatron all-reduces this weight's gradient over the first and the last stage.
        """
        if self.model.tied:
            weight = self.model.get_parameter("embedding.weight")
        else:
            weight = None
        if weight is None or not weight.requires_grad:
            return None
        return weight

    def forward(
        self, batch: Batch, states: States | None, chunks: MultiChunkForward | None = None
    ) -> ModelOut | StageOutput:
        with plain_torch():
            if chunks is not None:
                return chunks.run(self.model, batch, states, self.received)
            return self.model(batch.tokens_BL, states, batch.seq, self.received, logits=False)


def mark_for_megatron(model: LanguageModel, copied: Mapping[str, bool]) -> None:
    """Set the weight attributes that Megatron and this package's optimizer read.

    copied: letter whose weights several stages share -> True if an earlier stage holds the weights too

    Two attributes need an explanation. `allreduce` is False for experts, whose gradients are reduced over the ranks
    that hold the same experts. If `tensor_model_parallel` is False, Megatron treats the weights on all tensor-parallel
    ranks as copies.
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
            "lr_factor": parameter.lr_factor,
            "partial_over_tensor": cut is None and is_partial(parameter, tensor),
            "shared_embedding": is_tied or letter in copied,
            "shared": (is_tied and not model.slice.first) or (letter is not None and copied.get(letter, False)),
        }
        for mark, value in marks.items():
            setattr(weight, mark, value)


def is_partial(parameter: Parameter, tensor: TensorGroup) -> bool:
    """Return True if a replicated weight's gradient must be all-reduced over tensor-parallel ranks.

    This is so if each rank computes the gradient from its own heads or tokens only.
    """
    partial = parameter.partial_gradient or (tensor.sequence and parameter.sequence_partial)
    return tensor.size > 1 and partial


def build_stages(
    arch: Architecture, config: Config, groups: Groups, *, dtype: torch.dtype, device: torch.device
) -> list[Stage]:
    """Build this rank's pipeline stages with uninitialised weights, in the order of its virtual stages."""
    layers = stages_of(arch, config)
    virtual = config.parallel.virtual_pipeline
    sent_dtype = stream_dtype(dtype, config.model.residual_fp32)
    megatron = schedule_config(config.model.width, dtype, sent_dtype, config.parallel)
    # only Transformer Engine's layers read `accumulate`; by default they do not fuse the accumulation of gradients
    backend = {"fp8": fp8_of(arch, config, groups), "accumulate": config.parallel.gradient_accumulation_fusion is True}
    tensor = replace(groups.tensor, backend=replace(groups.tensor.backend, **backend))
    homes = shared_homes(arch, layers)
    stages = []
    for stage, chunk in enumerate(chunks_on(config.parallel, groups.pipeline.rank)):
        model_slice = ModelSlice(layers[chunk], chunk == 0, chunk == len(layers) - 1, tensor, groups.meshes)
        with device:
            model = LanguageModel(arch, model_slice, config.parallel.recompute, config.parallel.offload)
        stages.append(Stage(model.cast(dtype), megatron, stage if virtual > 1 else None, chunk, homes))
    stages[0].shared = shared_gradients(arch.table, config, homes, dtype=dtype, pipeline=groups.pipeline)
    return stages


def shared_gradients(
    table: Mapping[str, Parameter], config: Config, letters: Collection[str], *, dtype: torch.dtype, pipeline: RankGroup
) -> SharedGradients | None:
    """Return the `SharedGradients` for the weights that sub-layers of these letters share; None if there are none."""
    shared = {
        name: weight
        for name, weight in table.items()
        if isinstance(weight.owner, LetterOwner) and weight.owner.letter in letters
    }
    # The dtype must equal that of Megatron's gradient buffers (`data_parallel_config`), also on ranks without a copy.
    narrow = KeptFormat.fp32 != config.precision.gradients
    if narrow:
        summed = dtype
    else:
        summed = torch.promote_types(dtype, torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    if not shared:
        return None
    shapes = {name: weight.shard_shape(config.parallel.mesh_sizes) for name, weight in shared.items()}
    dtypes = {name: wide if weight.fp32 else summed for name, weight in shared.items()}
    return SharedGradients(shapes, dtypes, pipeline)


def fp8_of(arch: Architecture, config: Config, groups: Groups) -> Fp8 | None:
    """Return the FP8 settings for projections; None if the precision is not FP8."""
    precision = config.precision
    if precision.name not in FP8_MULTIPLES:
        return None
    # The ranks of a stage hold shards of the same weights, and tokens of the same step. So they reduce their amax
    # values, from which scale factors are computed. A group is passed even if it has only one rank: without a group,
    # Transformer Engine would reduce over all processes, and so over several stages.
    shared = groups.stage.group
    history = precision.history
    layers = fp8_layers(arch, precision)
    return Fp8(precision.name, layers, history, precision.emulate, precision.cache_weights, shared)


def fuses_accumulation(config: Config) -> bool:
    """Return True if matrix products add weight gradients directly to Megatron's buffers.

    By default they do so on a GPU, if torch has one kernel that multiplies and adds, and if torch.compile is not used:
    it can't trace such an addition.
    """
    chosen = config.parallel.gradient_accumulation_fusion
    if chosen is None:
        return SUMS_WIDER and compute_device().type == "cuda" and not config.run.compile
    return chosen


def data_parallel(
    stages: Sequence[Stage], config: Config, groups: Groups, dtype: torch.dtype
) -> list[DistributedDataParallel]:
    """Wrap initialised stages in Megatron's DistributedDataParallel, which reduces gradients over ranks."""
    parallel = config.parallel
    if parallel.overlap_param_gather and parallel.virtual_pipeline > 1 and compute_device().type == "cpu":
        message = "is true, but gloo confuses the weights that virtual stages gather ahead; set it to false"
        raise ConfigError([Problem("parallel.overlap_param_gather", "unsupported", message)])
    settings = data_parallel_config(parallel, config.precision.gradients, dtype)
    # Only virtual stage 0 divides its gradients into buckets, which are reduced while its backward pass runs. Each of
    # the other virtual stages has one bucket, which is reduced while the next virtual stage computes.
    wrapped = [
        DistributedDataParallel(stage.config, settings, stage, disable_bucketing=index > 0)
        for index, stage in enumerate(stages)
    ]
    if fuses_accumulation(config):
        for stage in stages:
            mark_fused_accumulation(stage)
    for chunk in wrapped:
        add_small_gradients_together(chunk)
    # Megatron's schedules call the functions that the first stage's config holds
    stages[0].config.finalize_model_grads_func = partial(finalize_gradients, groups)
    if parallel.overlap_grad_reduce:
        no_sync: Any = [chunk.no_sync for chunk in wrapped]
        if len(wrapped) > 1:
            stages[0].config.no_sync_func = no_sync
        else:
            stages[0].config.no_sync_func = no_sync[0]
    return wrapped


def stop_before_finalizing(stages: Sequence[Stage], watch: Stopwatch) -> None:
    """Make each step stop the watch before it finalizes gradients, because finalizing waits for other ranks."""
    config: Any = stages[0].config
    finalize = config.finalize_model_grads_func

    def stopped(
        stages: list[Any], tokens: Tensor | None = None, pg_collection: Any = None, force_all_reduce: bool = False
    ) -> None:
        watch.stop()
        finalize(stages, tokens, pg_collection, force_all_reduce)

    config.finalize_model_grads_func = stopped


def finalize_gradients(
    groups: Groups,
    stages: list[Any],
    tokens: Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> None:
    """Reduce a step's gradients. Megatron calls this function after the last micro-batch.

    1. Megatron reduces gradients over data-parallel ranks, and over a tied embedding's two copies.
    2. Gradients of weights that sub-layers on several stages share are all-reduced over the stages.
    3. All gradients are divided by the number of loss tokens in the step.
    4. A replicated weight's gradient is all-reduced over tensor-parallel ranks, if each of these ranks computes it from
       its own heads or tokens only.

    tokens: how many loss tokens this data-parallel rank has; set only on the last stage
    """
    finalize_model_grads(stages, None, pg_collection, force_all_reduce)  # None: do not divide by tokens
    if (shared := stages[0].module.shared) is not None:
        weights = {name: weight for stage in stages for name, weight in stage.module.model.named_parameters()}
        shared.sum_over_stages(weights, compute_device())
    if tokens is not None:
        _divide_by_tokens(stages, tokens, groups)
    trained = (w for stage in stages for w in stage.parameters() if w.requires_grad)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for weight in trained:
        if weight.partial_over_tensor:
            by_dtype.setdefault(weight.main_grad.dtype, []).append(weight.main_grad)
    for gradients in by_dtype.values():
        # one all-reduce for all gradients of a dtype, because they are many and small
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=groups.tensor.group)
        for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(summed)


def _divide_by_tokens(stages: Sequence[Any], tokens: Tensor, groups: Groups) -> None:
    """Divide the gradients by the number of loss tokens on all data-parallel ranks.

    The last stage has counted the tokens. Megatron's own division would make the host wait for the device.
    """
    assert groups.pipeline.group is not None
    *_, last = dist.get_process_group_ranks(groups.pipeline.group)
    dist.broadcast(tokens, src=last, group=groups.pipeline.group)
    dist.all_reduce(tokens, group=groups.dense.copies.group)
    scale = torch.where(tokens > 0, 1.0 / tokens, 1.0)  # without loss tokens, all gradients are 0
    for stage in stages:
        stage.scale_gradients(scale)
