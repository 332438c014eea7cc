"""Linear layers for mixers, sharded over tensor-parallel ranks by megatron-core.

A column-parallel layer's outputs stay on their rank. A row-parallel layer takes such inputs and sums over ranks.
Between them a mixer works on its rank's channels or heads and needs to know nothing else:

    x = enter(x_LBD, tensor)               all tokens on every rank; in backward the ranks' gradients are summed
    y = self.out_proj(act(self.in_proj(x)))

Where only projections read the input, `projected` computes them together (`entered.py`). Under sequence parallelism
x_LBD holds this rank's tokens: `enter` gathers them, and a row-parallel layer scatters them again. On one rank all of
this is plain matrix products. Weights are left uninitialised (`model/init.py` fills them).
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
from hybridtron.parallel.accumulate import MARK, AccumulatedLinear, accumulates
from hybridtron.parallel.adapters import adapter_of
from hybridtron.parallel.entered import EnteredProducts, Entry
from hybridtron.parallel.fp8 import Fp8, Fp8Linear
from hybridtron.parallel.mcore import layer_config
from hybridtron.parallel.mesh import RankGroup
from hybridtron.parallel.transformer_engine import local_linear


@dataclass(frozen=True)
class Products:
    """Backend of the linear layers: megatron-core, Transformer Engine or FP8 for large projections (`fp8`)."""

    transformer_engine: bool = False
    fp8: Fp8 | None = None
    accumulate: bool = False  # Transformer Engine's layers add weight gradients to Megatron's buffers

    @property
    def are_megatrons(self) -> bool:
        """True for megatron-core's own products, neither Transformer Engine's nor FP8."""
        return not self.transformer_engine and self.fp8 is None


MEGATRON = Products()


@dataclass(frozen=True)
class TensorGroup(RankGroup):
    """Tensor-parallel ranks that divide every layer, this rank's index, and the backend of their layers."""

    sequence: bool = False
    products: Products = MEGATRON
    regather: bool = False  # gather a mixer's input again in backward instead of saving it

    def whole(self) -> TensorGroup:
        """Return a single-rank group with the same backend, for a weight that every rank replicates."""
        return TensorGroup(products=self.products)

    def without_fp8(self) -> TensorGroup:
        """Return the group without FP8, for projections that stay in the stream's precision."""
        if self.products.fp8 is None:
            return self
        return replace(self, products=replace(self.products, fp8=None))

    def of_layer(self, index: int) -> TensorGroup:
        """Return the group for the sub-layer at `index`, without FP8 if that sub-layer stays in bf16."""
        fp8 = self.products.fp8
        if fp8 is None or index in fp8.layers:
            return self
        return self.without_fp8()


SINGLE_RANK = TensorGroup()


class PlainLinear(nn.Module):
    """Product x @ weight.T on one rank. No projection of these models has a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor | None) -> Tensor:
        """Return the product, or the weight itself if x is None (see `projected`)."""
        if x is None:
            return self.weight
        return product(x, self.weight)


class BranchingLinear(PlainLinear):
    """Linear layer that returns its input too, for a second consumer; see `ops/product/branch.py`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return branch(LinearInputs(x, self.weight))


class ColumnParallel(ColumnParallelLinear):
    """Megatron-core's column-parallel layer. Its input has passed `enter`, which sums input gradients over ranks."""

    def __init__(self, in_features: int, out_features: int, tensor: TensorGroup) -> None:
        config = layer_config(tensor.size, sequence=False)
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=leave_unfilled,
            bias=False,
            disable_grad_reduce=True,
            tp_group=tensor.group,
        )

    def forward(self, x: Tensor | None) -> Tensor:
        """Return the product, or the weight if x is None: a call makes Megatron wait for its all-gather."""
        assert self.weight is not None
        if x is None:
            return self.weight
        if accumulates(self.weight):
            return product(x, self.weight)
        return super().forward(x)[0]


class RowParallel(RowParallelLinear):
    """Megatron-core's row-parallel layer: outputs are summed over ranks, and scattered by tokens if `sequence`."""

    sums_inside = True

    def __init__(self, in_features: int, out_features: int, tensor: TensorGroup, sequence: bool) -> None:
        super().__init__(
            in_features,
            out_features,
            config=layer_config(tensor.size, sequence=sequence),
            init_method=leave_unfilled,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=tensor.group,
        )

    def forward(self, x: Tensor) -> Tensor:
        adapter = adapter_of(self)
        if not accumulates(self.weight) and adapter is None:
            return super().forward(x)[0]
        y = product(x, self.weight)
        y = y if adapter is None else adapter(x, y, self.weight)
        return _sum_over_ranks(self.sequence_parallel)(y, group=self.tp_group)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T, with the weight's gradient accumulated in place if the weight is marked for that."""
    if accumulates(weight):
        return AccumulatedLinear.apply(x, weight)  # type: ignore[return-value]
    return linear(LinearInputs(x, weight))


def accumulate_in_products(model: nn.Module) -> None:
    """Mark these layers' weights, so that products add gradients to Megatron's existing buffers."""
    for module in model.modules():
        if type(module) in (PlainLinear, ColumnParallel, RowParallel):
            setattr(module.weight, MARK, True)


def column_parallel(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Build a layer that computes this rank's slice of the outputs."""
    if tensor.size > 1 and tensor.products.are_megatrons:
        return ColumnParallel(in_features, out_features, tensor)
    return _product(in_features, tensor.share(out_features), tensor.products)


def row_parallel(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Build a layer that takes this rank's slice of the inputs and sums the outputs over ranks."""
    return _summed(in_features, out_features, tensor, tensor.sequence)


def row_parallel_inside(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Build a row-parallel layer for use inside a mixer by `beside`: every rank gets all outputs of all tokens.

    Each rank uses them for its own channels only, so their gradients are partial until `sum_gradients`. Never in FP8.
    """
    if tensor.size == 1 and not tensor.products.transformer_engine:
        return BranchingLinear(in_features, out_features)
    return _summed(in_features, out_features, tensor.without_fp8(), sequence=False)


def beside(projection: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input (for its second consumer) and its projection.

    The product adds its gradient in place to the second consumer's, which must be a tensor of its own.
    """
    if isinstance(projection, BranchingLinear):
        return projection(x)
    return (x, projection(x))


def row_parallel_by_channel(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Build a row-parallel layer that reduce-scatters its outputs by channel, for all tokens.

    Elementwise functions of the outputs can follow on each rank's channels, before `leave`.
    """
    layer = _product(tensor.share(in_features), out_features, tensor.products)
    if tensor.size > 1:
        layer.register_forward_hook(
            lambda _, given, y: reduce_scatter_last_dim_to_tensor_parallel_region(y, group=tensor.group)
        )
    return layer


def _summed(in_features: int, out_features: int, tensor: TensorGroup, sequence: bool) -> nn.Module:
    if tensor.size > 1 and tensor.products.are_megatrons:
        return RowParallel(in_features, out_features, tensor, sequence)
    layer = _product(tensor.share(in_features), out_features, tensor.products)
    if tensor.size > 1:
        summed = _sum_over_ranks(sequence)
        layer.register_forward_hook(lambda _, given, y: summed(y, group=tensor.group))
    return layer


def _sum_over_ranks(sequence: bool) -> Callable[..., Tensor]:
    """Return the collective that sums outputs: reduce-scatter by tokens if `sequence`, otherwise all-reduce."""
    if sequence:
        return reduce_scatter_to_sequence_parallel_region
    return reduce_from_tensor_model_parallel_region


def _product(in_features: int, out_features: int, products: Products) -> nn.Module:
    """Build one rank's linear layer for the backend, without a bias."""
    if products.fp8 is not None and products.fp8.emulate:
        return Fp8Linear(in_features, out_features, products.fp8)
    if not products.are_megatrons:
        return local_linear(in_features, out_features, products.fp8, products.accumulate)
    return PlainLinear(in_features, out_features)


def enter(x_LBD: Tensor, tensor: TensorGroup) -> Tensor:
    """Bring the residual stream into a mixer: all tokens on every rank; in backward gradients are summed."""
    if tensor.size == 1:
        return x_LBD
    if tensor.sequence:
        return gather_from_sequence_parallel_region(x_LBD, tensor_parallel_output_grad=True, group=tensor.group)
    return copy_to_tensor_model_parallel_region(x_LBD, group=tensor.group)


@dataclass(frozen=True)
class InParts:
    """Projection whose output is split into parts of these channel counts."""

    projection: nn.Module
    sizes: Sequence[int]


def projected(x_LBD: Tensor, tensor: TensorGroup, *projections: nn.Module | InParts) -> tuple[Tensor, ...]:
    """Apply column-parallel projections to the residual stream, and return their outputs part by part.

    In backward the stream's gradient is reduced over ranks while the weights' gradients are computed. On a GPU
    products accumulate the gradients of parts and of several projections, which are not concatenated or added first.
    Both need megatron-core's products; with adapters, Transformer Engine or FP8 each projection is called separately.
    """
    cuts = [projection if isinstance(projection, InParts) else InParts(projection, ()) for projection in projections]
    joined = len(cuts) > 1 or any(cut.sizes for cut in cuts)
    by_itself = tensor.size > 1 or (joined and x_LBD.is_cuda and not torch.compiler.is_compiling())
    adapted = any(adapter_of(cut.projection) is not None for cut in cuts)  # adapters read the gathered input, too
    if adapted or not (by_itself and tensor.products.are_megatrons):
        x_LBD = enter(x_LBD, tensor)
        outputs = ((cut.projection(x_LBD), cut.sizes) for cut in cuts)
        return tuple(part for y_LBC, sizes in outputs for part in (y_LBC.split(sizes, -1) if sizes else (y_LBC,)))
    weights = [cut.projection(None) for cut in cuts]
    sizes = [cut.sizes or (len(weight),) for cut, weight in zip(cuts, weights, strict=True)]
    group = tensor.group if tensor.size > 1 else None
    entry = Entry(group, tensor.sequence, tensor.sequence and tensor.regather, sizes)
    return EnteredProducts.apply(x_LBD, entry, *weights)  # type: ignore[return-value]


def leave(y_LBC: Tensor, tensor: TensorGroup) -> Tensor:
    """Return from this rank's channels to the residual stream: all channels, of all tokens or of this rank's.

    With `row_parallel_by_channel` this sends as much as one all-reduce. Under sequence parallelism, where an
    all-to-all exchanges channels for tokens, it sends 1 / ranks more than one reduce-scatter.
    """
    if tensor.size == 1:
        return y_LBC
    if tensor.sequence:
        length, rows, _ = y_LBC.shape
        return all_to_all_hp2sp(y_LBC, group=tensor.group).view(length // tensor.size, rows, -1)
    return gather_from_tensor_model_parallel_region(y_LBC, group=tensor.group)


def sum_gradients(x: Tensor, tensor: TensorGroup) -> Tensor:
    """Return x unchanged; in backward all-reduce its partial gradients."""
    if tensor.size == 1:
        return x
    return copy_to_tensor_model_parallel_region(x, group=tensor.group)


def sum_shares(x: Tensor, tensor: TensorGroup) -> Tensor:
    """All-reduce x, so that every rank has the sum; in backward the ranks' gradients are all-reduced too."""
    if tensor.size == 1:
        return x
    summand = x.clone(memory_format=torch.contiguous_format)  # Megatron sums in place
    return sum_gradients(reduce_from_tensor_model_parallel_region(summand, group=tensor.group), tensor)


def leave_unfilled(weight: Tensor) -> None:
    """Do nothing: Megatron's layers require an initialiser, but `model/init.py` initialises the weights."""
