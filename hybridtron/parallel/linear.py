"""The layers that mixers are built from, cut over tensor-parallel ranks by megatron-core.

A column-parallel layer makes outputs that stay on their rank; a row-parallel layer takes such inputs and sums over
ranks. Between them a mixer works on its rank's share of channels or heads and needs to know nothing else:

    x = enter(x_LBD, tensor)               all tokens on every rank; in backward the ranks' gradients are summed
    y = self.out_proj(act(self.in_proj(x)))

Where projections are all that read the input, `projected` makes them from it together (`entered.py`).
Under sequence parallelism x_LBD holds a rank's share of the tokens: `enter` gathers them, a row-parallel layer hands
them out again. On one rank all of this is plain matrix products. Weights are left uninitialised (`model/init.py`).
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
from hybridtron.parallel.cut import RankGroup
from hybridtron.parallel.entered import EnteredProducts, Entry
from hybridtron.parallel.fp8 import Fp8, Fp8Linear
from hybridtron.parallel.mcore import layer_config
from hybridtron.parallel.transformer_engine import local_linear


@dataclass(frozen=True)
class Products:
    """Whose matrix products projections are; with `fp8` the large ones, which the parameter table marks, are its."""

    transformer_engine: bool = False
    fp8: Fp8 | None = None
    accumulate: bool = False  # Transformer Engine's add the gradients of weights to a step's sums

    @property
    def are_megatrons(self) -> bool:
        """Not another package's, and not of FP8."""
        return not self.transformer_engine and self.fp8 is None


MEGATRON = Products()


@dataclass(frozen=True)
class TensorGroup(RankGroup):
    """The ranks that share every layer between them, and this one's place among them; whose layers they use."""

    sequence: bool = False
    products: Products = MEGATRON
    regather: bool = False  # what enters a mixer is gathered again in backward, and not kept

    def whole(self) -> TensorGroup:
        """For a weight that each of these ranks holds whole."""
        return TensorGroup(products=self.products)

    def without_fp8(self) -> TensorGroup:
        """For projections that stay in the stream's precision."""
        return self if self.products.fp8 is None else replace(self, products=replace(self.products, fp8=None))

    def of_layer(self, index: int) -> TensorGroup:
        """For a sub-layer of the model, which may be one of those that stay in bf16."""
        fp8 = self.products.fp8
        return self if fp8 is None or index in fp8.layers else self.without_fp8()


SINGLE_RANK = TensorGroup()


class PlainLinear(nn.Module):
    """x @ weight.T, without a bias: no projection of these models has one."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor | None) -> Tensor:
        """Without an input its weight, as `ColumnParallel`."""
        return self.weight if x is None else product(x, self.weight)


class BranchingLinear(PlainLinear):
    """The input too, for what uses it besides."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return branch(LinearInputs(x, self.weight))


class ColumnParallel(ColumnParallelLinear):
    """Megatron-core's column-parallel layer. Its input has passed `enter`, so it leaves gradients of it unsummed."""

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
        """Without an input its weight, for `projected`: before the call Megatron may not have gathered it."""
        assert self.weight is not None
        if x is None:
            return self.weight
        return product(x, self.weight) if accumulates(self.weight) else super().forward(x)[0]


class RowParallel(RowParallelLinear):
    """Megatron-core's row-parallel layer: the ranks' outputs are summed, and scattered by tokens if `sequence`."""

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
    """x weight^T."""
    return AccumulatedLinear.apply(x, weight) if accumulates(weight) else linear(LinearInputs(x, weight))  # type: ignore[return-value]


def accumulate_in_products(model: nn.Module) -> None:
    """From now on products add the gradients of these layers' weights to the step's sums, which Megatron has made."""
    for module in model.modules():
        if type(module) in (PlainLinear, ColumnParallel, RowParallel):
            setattr(module.weight, MARK, True)


def column_parallel(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Each rank makes its own share of the outputs."""
    if tensor.size > 1 and tensor.products.are_megatrons:
        return ColumnParallel(in_features, out_features, tensor)
    return _product(in_features, tensor.share(out_features), tensor.products)


def row_parallel(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Each rank holds its own share of the inputs; the outputs are summed and return to the stream."""
    return _summed(in_features, out_features, tensor, tensor.sequence)


def row_parallel_inside(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """As `row_parallel`, for use between `enter` and the row-parallel layer: every rank gets all outputs of all tokens.

    What follows uses them for its own channels only, so their gradients are partial until `sum_gradients`. It is never
    one of the large projections, which multiply in FP8. Called by `beside`.
    """
    if tensor.size == 1 and not tensor.products.transformer_engine:
        return BranchingLinear(in_features, out_features)
    return _summed(in_features, out_features, tensor.without_fp8(), sequence=False)


def beside(projection: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What is projected, for its other use, whose gradient is that use's alone; and the product."""
    return projection(x) if isinstance(projection, BranchingLinear) else (x, projection(x))


def row_parallel_by_channel(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """As `row_parallel`, but each rank gets the sums of its own share of the outputs, for all tokens.

    What is elementwise in the outputs can follow on the ranks' shares, before `leave`.
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
    """Of what each has of the outputs; scattered by tokens if `sequence`."""
    return reduce_scatter_to_sequence_parallel_region if sequence else reduce_from_tensor_model_parallel_region


def _product(in_features: int, out_features: int, products: Products) -> nn.Module:
    """One rank's product, without a bias."""
    if products.fp8 is not None and products.fp8.emulate:
        return Fp8Linear(in_features, out_features, products.fp8)
    if not products.are_megatrons:
        return local_linear(in_features, out_features, products.fp8, products.accumulate)
    return PlainLinear(in_features, out_features)


def enter(x_LBD: Tensor, tensor: TensorGroup) -> Tensor:
    """From the residual stream into a mixer: all tokens on every rank."""
    if tensor.size == 1:
        return x_LBD
    if tensor.sequence:
        return gather_from_sequence_parallel_region(x_LBD, tensor_parallel_output_grad=True, group=tensor.group)
    return copy_to_tensor_model_parallel_region(x_LBD, group=tensor.group)


@dataclass(frozen=True)
class InParts:
    """A projection whose product is handed out in parts of its channels."""

    projection: nn.Module
    sizes: Sequence[int]


def projected(x_LBD: Tensor, tensor: TensorGroup, *projections: nn.Module | InParts) -> tuple[Tensor, ...]:
    """What column-parallel layers make of the residual stream, part by part. In backward the sum over ranks of the
    stream's gradient runs beside the weights' gradients, and on a GPU the gradients of parts, and of several
    projections, are not joined or added up but by the products; unless these are another package's or of FP8.
    """
    cuts = [each if isinstance(each, InParts) else InParts(each, ()) for each in projections]
    joined = len(cuts) > 1 or any(cut.sizes for cut in cuts)
    by_itself = tensor.size > 1 or (joined and x_LBD.is_cuda and not torch.compiler.is_compiling())
    adapted = any(adapter_of(cut.projection) is not None for cut in cuts)  # they read what enters, too
    if adapted or not (by_itself and tensor.products.are_megatrons):
        x_LBD = enter(x_LBD, tensor)
        made = ((cut.projection(x_LBD), cut.sizes) for cut in cuts)
        return tuple(part for y_LBC, sizes in made for part in (y_LBC.split(sizes, -1) if sizes else (y_LBC,)))
    weights = [cut.projection(None) for cut in cuts]
    sizes = [cut.sizes or (len(weight),) for cut, weight in zip(cuts, weights, strict=True)]
    group = tensor.group if tensor.size > 1 else None
    entry = Entry(group, tensor.sequence, tensor.sequence and tensor.regather, sizes)
    return EnteredProducts.apply(x_LBD, entry, *weights)  # type: ignore[return-value]


def leave(y_LBC: Tensor, tensor: TensorGroup) -> Tensor:
    """From shares of the channels back to the residual stream. With the scattered sums before it this sends what one
    sum over ranks sends; under sequence parallelism, where channels are exchanged for tokens, 1 / ranks of it more.
    """
    if tensor.size == 1:
        return y_LBC
    if tensor.sequence:
        length, rows, _ = y_LBC.shape
        return all_to_all_hp2sp(y_LBC, group=tensor.group).view(length // tensor.size, rows, -1)
    return gather_from_tensor_model_parallel_region(y_LBC, group=tensor.group)


def sum_gradients(x: Tensor, tensor: TensorGroup) -> Tensor:
    """The same on every rank going forward; in backward the ranks' partial gradients are summed."""
    return x if tensor.size == 1 else copy_to_tensor_model_parallel_region(x, group=tensor.group)


def sum_shares(x: Tensor, tensor: TensorGroup) -> Tensor:
    """The sum of what the ranks have, on every rank; what it is used for on each sends its gradient to all of them."""
    if tensor.size == 1:
        return x
    own = x.clone(memory_format=torch.contiguous_format)  # Megatron sums in place
    return sum_gradients(reduce_from_tensor_model_parallel_region(own, group=tensor.group), tensor)


def leave_unfilled(weight: Tensor) -> None:
    """Megatron's layers ask for an initialiser; ours are filled by `model/init.py`."""
