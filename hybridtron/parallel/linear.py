"""Linear layers for mixers, sharded over tensor-parallel ranks by megatron-core.

A mixer is a sub-layer's computation, such as attention or an MLP. Between a column-parallel and a row-parallel layer
each rank computes only its channels or heads:

    x = gather_input(x_LBD, tensor)        all tokens on every rank; in backward the ranks' gradients are summed
    h = act(self.in_proj(x))               column-parallel: the rank computes its output channels
    y = self.out_proj(h)                   row-parallel: the rank multiplies its channels, and the ranks' results
                                           are summed

If only column-parallel layers read x, `project_all` computes `gather_input` and these layers together
(`overlapped_linear.py`). Under sequence parallelism x_LBD holds this rank's tokens: `gather_input` gathers all tokens,
and a row-parallel layer scatters its outputs by tokens. On one rank, all layers are plain matrix products. Weights are
created uninitialized, and `model/init.py` initializes them.

Legend: L tokens in a row, B rows (sequences in a micro-batch), D width of the residual stream, C output channels of a
projection on this rank. Under sequence parallelism L may also be this rank's number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from hybridtron.ops.product import LinearInputs, linear
from hybridtron.ops.product.branch import branch
from hybridtron.parallel.adapters import adapter_of
from hybridtron.parallel.experts import ExpertRanks
from hybridtron.parallel.fp8 import Fp8, Fp8Linear
from hybridtron.parallel.fused_grad_accumulation import MARK, FusedAccumulationLinear, is_fused
from hybridtron.parallel.mcore import layer_config
from hybridtron.parallel.mesh import RankGroup
from hybridtron.parallel.overlapped_linear import InputComm, OverlappedColumnLinear
from hybridtron.parallel.transformer_engine import local_linear


@dataclass(frozen=True)
class LinearBackend:
    """Backend of the linear layers: Transformer Engine, emulated FP8, or else megatron-core."""

    transformer_engine: bool = False
    fp8: Fp8 | None = None  # FP8 settings; None without FP8
    accumulate: bool = False  # True: Transformer Engine's layers add weight gradients to Megatron's buffers

    @property
    def is_megatron(self) -> bool:
        """True if neither Transformer Engine nor FP8 is used."""
        return not self.transformer_engine and self.fp8 is None


MEGATRON = LinearBackend()


@dataclass(frozen=True)
class TensorGroup(RankGroup):
    """Tensor-parallel ranks that divide the linear layers, this rank's index, and the layers' backend."""

    sequence: bool = False  # sequence parallelism: the ranks also divide the tokens of the residual stream
    backend: LinearBackend = MEGATRON
    regather: bool = False  # save only this rank's tokens of a mixer's input, and gather all tokens again in backward
    experts: ExpertRanks | None = None  # ranks that divide routed experts; None: this group divides every expert

    @property
    def expert_ranks(self) -> ExpertRanks:
        """The ranks that divide routed experts and their inner channels."""
        if self.experts is None:
            return ExpertRanks(tensor=self)
        return self.experts

    @property
    def routes_own_tokens(self) -> bool:
        """True if each rank routes only its own tokens of the residual stream, to full experts."""
        return self.sequence and self.expert_ranks.tensor.size < self.size

    def whole(self) -> TensorGroup:
        """Return a single-rank group with the same backend, for a weight that every rank holds in full."""
        return TensorGroup(backend=self.backend)

    def without_fp8(self) -> TensorGroup:
        """Return the group without FP8, for projections that stay in bf16."""
        if self.backend.fp8 is None:
            return self
        return replace(self, backend=replace(self.backend, fp8=None))

    def of_layer(self, index: int) -> TensorGroup:
        """Return the group for the sub-layer at `index`, without FP8 if that sub-layer stays in bf16."""
        fp8 = self.backend.fp8
        if fp8 is None or index in fp8.layers:
            return self
        return self.without_fp8()


SINGLE_RANK = TensorGroup()


class PlainLinear(nn.Module):
    """Linear layer without a bias on one rank, x @ weight.T."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor | None) -> Tensor:
        """Return x @ weight.T, or the weight itself if x is None (see `project_all`)."""
        if x is None:
            return self.weight
        return product(x, self.weight)


class BranchingLinear(PlainLinear):
    """Linear layer that returns its input and its output; the input has a second use (`ops/product/branch.py`)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return branch(LinearInputs(x, self.weight))


class ColumnParallel(ColumnParallelLinear):
    """Megatron-core's column-parallel layer. Backward has no all-reduce, because `gather_input` sums the gradients."""

    def __init__(self, in_features: int, out_features: int, tensor: TensorGroup) -> None:
        config = layer_config(tensor.size, sequence=False)
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=no_init,
            bias=False,
            disable_grad_reduce=True,
            tp_group=tensor.group,
        )

    def forward(self, x: Tensor | None) -> Tensor:
        """Return this rank's slice of the output, or the weight if x is None (see `project_all`).

        The weight must be obtained by a call: a forward pre-hook of Megatron waits until the updated weight has been
        all-gathered (`parallel.overlap_param_gather`).
        """
        assert self.weight is not None
        if x is None:
            return self.weight
        if is_fused(self.weight):
            return product(x, self.weight)
        return super().forward(x)[0]


class RowParallel(RowParallelLinear):
    """Megatron-core's row-parallel layer: it sums outputs over ranks, and scatters them by tokens if `sequence`."""

    sums_inside = True  # `forward` itself adds an adapter's output, so that `attach_adapters` registers no hook for it

    def __init__(self, in_features: int, out_features: int, tensor: TensorGroup, sequence: bool) -> None:
        super().__init__(
            in_features,
            out_features,
            config=layer_config(tensor.size, sequence=sequence),
            init_method=no_init,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=tensor.group,
        )

    def forward(self, x: Tensor) -> Tensor:
        adapter = adapter_of(self)
        if not is_fused(self.weight) and adapter is None:
            return super().forward(x)[0]
        y = product(x, self.weight)
        y = y if adapter is None else adapter(x, y, self.weight)
        return _sum_over_ranks(self.sequence_parallel)(y, group=self.tp_group)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T.

    If `mark_fused_accumulation` has marked the weight, backward adds the weight's gradient to Megatron's buffer.
    """
    if is_fused(weight):
        return FusedAccumulationLinear.apply(x, weight)  # type: ignore[return-value]
    return linear(LinearInputs(x, weight))


def mark_fused_accumulation(model: nn.Module) -> None:
    """Mark the weights of all PlainLinear, ColumnParallel and RowParallel layers in a model.

    Backward adds a marked weight's gradient directly to Megatron's gradient buffer. Subclasses such as BranchingLinear
    are not marked.
    """
    for module in model.modules():
        if type(module) in (PlainLinear, ColumnParallel, RowParallel):
            setattr(module.weight, MARK, True)


def column_parallel(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Build a layer that computes this rank's slice of the output channels."""
    if tensor.size > 1 and tensor.backend.is_megatron:
        return ColumnParallel(in_features, out_features, tensor)
    return _product(in_features, tensor.share(out_features), tensor.backend)


def row_parallel(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Build a layer that takes this rank's slice of the input channels, and sums the outputs over ranks."""
    return _summed(in_features, out_features, tensor, tensor.sequence)


def row_parallel_inside(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Build a row-parallel layer for use inside a mixer: every rank gets all outputs for all tokens.

    The layer never uses FP8, and is called by `project_with_input`. Each rank uses the outputs only to compute its own
    channels, so the outputs' gradient on a rank is a partial sum. The caller must apply `all_reduce_gradients` to the
    outputs.
    """
    if tensor.size == 1 and not tensor.backend.transformer_engine:
        return BranchingLinear(in_features, out_features)
    return _summed(in_features, out_features, tensor.without_fp8(), sequence=False)


def project_with_input(projection: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and its projection. If the input has a second use, that use must take the returned input.

    In backward a `BranchingLinear` adds the input's two gradients in place, in the memory of the second use's gradient.
    So the second use must return a gradient that shares memory with no other tensor.
    """
    if isinstance(projection, BranchingLinear):
        return projection(x)
    return (x, projection(x))


def row_parallel_by_channel(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Build a row-parallel layer that sums its outputs over ranks, and scatters them by channels (for all tokens).

    Elementwise functions can follow on each rank's channels, before `gather_output`.
    """
    layer = _product(tensor.share(in_features), out_features, tensor.backend)
    if tensor.size > 1:
        layer.register_forward_hook(
            lambda _, given, y: reduce_scatter_last_dim_to_tensor_parallel_region(y, group=tensor.group)
        )
    return layer


def _summed(in_features: int, out_features: int, tensor: TensorGroup, sequence: bool) -> nn.Module:
    if tensor.size > 1 and tensor.backend.is_megatron:
        return RowParallel(in_features, out_features, tensor, sequence)
    layer = _product(tensor.share(in_features), out_features, tensor.backend)
    if tensor.size > 1:
        summed = _sum_over_ranks(sequence)
        layer.register_forward_hook(lambda _, given, y: summed(y, group=tensor.group))
    return layer


def _sum_over_ranks(sequence: bool) -> Callable[..., Tensor]:
    """Return the collective that sums outputs over ranks: reduce-scatter by tokens if `sequence`, else all-reduce."""
    if sequence:
        return reduce_scatter_to_sequence_parallel_region
    return reduce_from_tensor_model_parallel_region


def _product(in_features: int, out_features: int, backend: LinearBackend) -> nn.Module:
    """Build one rank's linear layer for the backend, without a bias."""
    if backend.fp8 is not None and backend.fp8.emulate:
        return Fp8Linear(in_features, out_features, backend.fp8)
    if not backend.is_megatron:
        return local_linear(in_features, out_features, backend.fp8, backend.accumulate)
    return PlainLinear(in_features, out_features)


def gather_input(x_LBD: Tensor, tensor: TensorGroup) -> Tensor:
    """Return the residual stream with all tokens on every rank; in backward sum the ranks' gradients."""
    if tensor.size == 1:
        return x_LBD
    if tensor.sequence:
        return gather_from_sequence_parallel_region(x_LBD, tensor_parallel_output_grad=True, group=tensor.group)
    return copy_to_tensor_model_parallel_region(x_LBD, group=tensor.group)


@dataclass(frozen=True)
class SplitProjection:
    """Projection whose output is split into parts along the channels."""

    projection: nn.Module
    sizes: Sequence[int]  # number of channels in each part, on this rank


def project_all(x_LBD: Tensor, tensor: TensorGroup, *projections: nn.Module | SplitProjection) -> tuple[Tensor, ...]:
    """Apply column-parallel projections to the residual stream, and return their outputs part by part.

    `OverlappedColumnLinear` computes all projections together, with two benefits in backward:

        - With several ranks, x_LBD's gradient is reduced over ranks while the weights' gradients are computed.
        - On a GPU, no kernels are needed to concatenate the gradients of a projection's parts, or to add the gradients
          that several projections give for x_LBD.

    Each projection is called by itself if neither benefit applies, or if adapters, Transformer Engine or FP8 are used.
    """
    cuts = [
        projection if isinstance(projection, SplitProjection) else SplitProjection(projection, ())
        for projection in projections
    ]
    joined = len(cuts) > 1 or any(cut.sizes for cut in cuts)
    by_itself = tensor.size > 1 or (joined and x_LBD.is_cuda and not torch.compiler.is_compiling())
    adapted = any(adapter_of(cut.projection) is not None for cut in cuts)  # adapters need the gathered input
    if adapted or not (by_itself and tensor.backend.is_megatron):
        x_LBD = gather_input(x_LBD, tensor)
        outputs = ((cut.projection(x_LBD), cut.sizes) for cut in cuts)
        return tuple(part for y_LBC, sizes in outputs for part in (y_LBC.split(sizes, -1) if sizes else (y_LBC,)))
    weights = [cut.projection(None) for cut in cuts]
    sizes = [cut.sizes or (len(weight),) for cut, weight in zip(cuts, weights, strict=True)]
    group = tensor.group if tensor.size > 1 else None
    comm = InputComm(group, tensor.sequence, tensor.sequence and tensor.regather, sizes)
    return OverlappedColumnLinear.apply(x_LBD, comm, *weights)  # type: ignore[return-value]


def gather_output(y_LBC: Tensor, tensor: TensorGroup) -> Tensor:
    """Gather all channels from the ranks, so that the result can be added to the residual stream.

    Every rank passes its channels for all tokens. Under sequence parallelism an all-to-all returns all channels for
    this rank's tokens, otherwise an all-gather returns all channels for all tokens.

    The reduce-scatter in `row_parallel_by_channel` and this all-gather together send as many bytes as one all-reduce.
    Under sequence parallelism the reduce-scatter and the all-to-all send 1 + 1 / R times the bytes of one
    reduce-scatter, for R ranks.
    """
    if tensor.size == 1:
        return y_LBC
    if tensor.sequence:
        length, rows, _ = y_LBC.shape
        return all_to_all_hp2sp(y_LBC, group=tensor.group).view(length // tensor.size, rows, -1)
    return gather_from_tensor_model_parallel_region(y_LBC, group=tensor.group)


def sum_output(y_LBD: Tensor, tensor: TensorGroup) -> Tensor:
    """Sum the ranks' outputs for all tokens. Under sequence parallelism, return the sum for this rank's tokens."""
    if tensor.size == 1:
        return y_LBD
    return _sum_over_ranks(tensor.sequence)(y_LBD, group=tensor.group)


def all_reduce_gradients(x: Tensor, tensor: TensorGroup) -> Tensor:
    """Return x unchanged; in backward all-reduce its gradient. Each rank passes a partial sum of the gradient."""
    if tensor.size == 1:
        return x
    return copy_to_tensor_model_parallel_region(x, group=tensor.group)


def all_reduce_sum(x: Tensor, tensor: TensorGroup) -> Tensor:
    """All-reduce x, so that every rank has the sum; in backward the ranks' gradients are all-reduced too."""
    if tensor.size == 1:
        return x
    summand = x.clone(memory_format=torch.contiguous_format)  # Megatron all-reduces in place
    return all_reduce_gradients(reduce_from_tensor_model_parallel_region(summand, group=tensor.group), tensor)


def no_init(weight: Tensor) -> None:
    """Leave a weight uninitialized: Megatron's layers require an initializer, but `model/init.py` does this work."""
