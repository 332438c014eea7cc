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

from dataclasses import dataclass, replace

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
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
from torch.nn import functional

from hybridtron.ops.product import LinearInputs, linear
from hybridtron.ops.product.branch import branch
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
        return self.weight if x is None else linear(LinearInputs(x, self.weight))


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
            init_method=_leave,
            bias=False,
            disable_grad_reduce=True,
            tp_group=tensor.group,
        )

    def forward(self, x: Tensor | None) -> Tensor:
        """Without an input its weight, for `projected`: before the call Megatron may not have gathered it."""
        if x is not None:
            return super().forward(x)[0]
        assert self.weight is not None
        return self.weight


class RowParallel(RowParallelLinear):
    """Megatron-core's row-parallel layer: the ranks' outputs are summed, and scattered by tokens if `sequence`."""

    def __init__(self, in_features: int, out_features: int, tensor: TensorGroup, sequence: bool) -> None:
        super().__init__(
            in_features,
            out_features,
            config=layer_config(tensor.size, sequence=sequence),
            init_method=_leave,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=tensor.group,
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def column_parallel(in_features: int, out_features: int, tensor: TensorGroup) -> nn.Module:
    """Each rank makes its own share of the outputs."""
    if tensor.size > 1 and tensor.products == MEGATRON:
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
    product = _product(tensor.share(in_features), out_features, tensor.products)
    if tensor.size > 1:
        product.register_forward_hook(
            lambda _, given, y: reduce_scatter_last_dim_to_tensor_parallel_region(y, group=tensor.group)
        )
    return product


def _summed(in_features: int, out_features: int, tensor: TensorGroup, sequence: bool) -> nn.Module:
    if tensor.size > 1 and tensor.products == MEGATRON:
        return RowParallel(in_features, out_features, tensor, sequence)
    product = _product(tensor.share(in_features), out_features, tensor.products)
    if tensor.size > 1:
        summed = reduce_scatter_to_sequence_parallel_region if sequence else reduce_from_tensor_model_parallel_region
        product.register_forward_hook(lambda _, given, y: summed(y, group=tensor.group))
    return product


def _product(in_features: int, out_features: int, products: Products) -> nn.Module:
    """One rank's product, without a bias."""
    if products.fp8 is not None and products.fp8.emulate:
        return Fp8Linear(in_features, out_features, products.fp8)
    if products != MEGATRON:
        return local_linear(in_features, out_features, products.fp8)
    return PlainLinear(in_features, out_features)


def enter(x_LBD: Tensor, tensor: TensorGroup) -> Tensor:
    """From the residual stream into a mixer: all tokens on every rank."""
    if tensor.size == 1:
        return x_LBD
    if tensor.sequence:
        return gather_from_sequence_parallel_region(x_LBD, tensor_parallel_output_grad=True, group=tensor.group)
    return copy_to_tensor_model_parallel_region(x_LBD, group=tensor.group)


def projected(x_LBD: Tensor, tensor: TensorGroup, *projections: nn.Module) -> tuple[Tensor, ...]:
    """What column-parallel layers make of the residual stream. In backward the sum over ranks of the stream's gradient
    runs beside the weights' gradients, unless these are another package's or of FP8.
    """
    if tensor.size == 1 or tensor.products != MEGATRON:
        x_LBD = enter(x_LBD, tensor)
        return tuple(projection(x_LBD) for projection in projections)
    entry = Entry(tensor.group, tensor.sequence, tensor.sequence and tensor.regather)
    weights = [projection(None) for projection in projections]
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


class Embedding(nn.Module):
    """Token vectors on one rank; the rows of its weight can serve as the output head too."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return functional.embedding(tokens_BL.T, self.weight)


class VocabularyParallel(VocabParallelEmbedding):
    """Megatron-core's embedding: each rank holds its own tokens' rows."""

    def __init__(self, vocab_size: int, width: int, tensor: TensorGroup) -> None:
        super().__init__(
            vocab_size,
            width,
            init_method=_leave,
            reduce_scatter_embeddings=tensor.sequence,
            config=layer_config(tensor.size, sequence=tensor.sequence),
            tp_group=tensor.group,
        )

    def forward(self, tokens_BL: Tensor) -> Tensor:
        # when it scatters the sequence Megatron puts it first, otherwise it keeps the order of the tokens
        return super().forward(tokens_BL if self.reduce_scatter_embeddings else tokens_BL.T)


def embedding(vocab_size: int, width: int, tensor: TensorGroup) -> nn.Module:
    """Tokens (B, L) -> the start of the residual stream (L, B, D)."""
    return Embedding(vocab_size, width) if tensor.size == 1 else VocabularyParallel(vocab_size, width, tensor)


def _leave(weight: Tensor) -> None:
    """Megatron's layers ask for an initialiser; ours are filled by `model/init.py`."""
