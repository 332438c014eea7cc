"""Low-rank adapters (LoRA, DoRA) for linear layers; `architecture/adapters.py` has their shapes and sharding.

    y = W x + scale B A x        W is frozen; the small matrices A and B are trained

x is the layer's input, y is its output, and scale is a constant from the configuration. An adapter is attached to a
linear layer when the model is built, so that attention, MLPs and other sub-layers need no code for adapters. In a
row-parallel layer every rank adds the adapter's partial output to the layer's partial output. One all-reduce then
serves both. With DoRA every rank also rescales its partial output before the all-reduce (`dora.py`).

The dropout mask is a function of the micro-batch's random key, the layer's name, the token, and the input channel's
index in the full layer. So the mask is the same in every parallel layout, and in a recomputed forward pass. The key is
in the micro-batch's `SeqInfo`, which a forward pre-hook passes to the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridtron.architecture.adapters import AdaptedPart, AdaptersConfig, adapted_projections
from hybridtron.architecture.base import Parameter
from hybridtron.data.batch import SeqInfo
from hybridtron.ops.dropout import DropoutInputs, channel_numbers, dropout, token_numbers
from hybridtron.parallel.dora import factors, row_lengths
from hybridtron.parallel.mesh import RankGroup


@dataclass(frozen=True)
class AdapterSizes:
    """Sizes and options for one rank's adapter shard.

    inputs: number of input channels on this rank
    first: index of the rank's first input channel among the layer's input channels
    parts: for each part of the layer's output, such as queries or keys, its number of output channels on this rank, and
        whether it is adapted
    rank: the adapter's rank, which is A's number of rows per adapted part
    scale: factor of B A x
    dropout: dropout probability
    dora: True for DoRA, False for LoRA
    sharing: the ranks that divide the input channels; a single rank if every rank has all input channels
    """

    inputs: int
    first: int
    parts: Sequence[AdaptedPart]
    rank: int
    scale: float
    dropout: float = 0.0
    dora: bool = False
    sharing: RankGroup = RankGroup()  # noqa: RUF009 (a value)


class Adapter(nn.Module):
    """Adds scale B A x to each adapted part of a layer's output; with DoRA it also rescales the output channels."""

    def __init__(self, layer: str, sizes: AdapterSizes) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = sizes
        # A has `rank` rows for each adapted part. B and M have a row for each output channel in the adapted parts.
        rows = self._rows()
        self.A = nn.Parameter(torch.empty(len(rows) * sizes.rank, sizes.inputs))
        self.B = nn.Parameter(torch.empty(sum(rows), sizes.rank))
        if sizes.dora:
            self.M = nn.Parameter(torch.empty(sum(rows)))
        else:
            self.M = None
        self.seq: SeqInfo | None = None  # set by `begin` for the current forward pass

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the adapted output of a layer with input x, output y and weight `weight`."""
        y = y + self.added(x)
        if self.M is None:
            return y
        return (y * self._factors(self.M, weight)).to(y.dtype)

    def added(self, x: Tensor) -> Tensor:
        """Return scale B A x, with zeros for the parts that are not adapted."""
        inner = (self._inner(x) * self.sizes.scale).split(self.sizes.rank, -1)
        pairs = zip(inner, self.B.split(self._rows()), strict=True)
        products = [
            functional.linear(*next(pairs)) if part.adapted else x.new_zeros(*x.shape[:-1], part.rows)
            for part in self.sizes.parts
        ]
        if len(products) == 1:
            return products[0]
        return torch.cat(products, -1)

    def begin(self, _mixer: nn.Module, given: tuple[Any, ...]) -> None:
        """Store the `SeqInfo` of a forward pass, which is the mixer's last argument.

        This method is a forward pre-hook of the mixer. It is also called when a forward pass is recomputed.
        """
        *_, self.seq = given

    def _rows(self) -> list[int]:
        return [part.rows for part in self.sizes.parts if part.adapted]

    def _factors(self, M: Tensor, weight: Tensor) -> Tensor:
        """Return DoRA's factor for every output channel; 1 for the parts that are not adapted."""
        sizes = self.sizes
        rows = self._rows()
        pieces = zip(self.A.split(sizes.rank), self.B.split(rows), M.split(rows), strict=True)
        row_factors = []
        for part, part_weight in zip(sizes.parts, weight.split([part.rows for part in sizes.parts]), strict=True):
            if not part.adapted:
                row_factors.append(M.new_ones(part.rows))
                continue
            A, B, M_part = next(pieces)
            row_factors.append(factors(M_part, *row_lengths(part_weight, A, B, sizes.scale, sizes.sharing)))
        return torch.cat(row_factors)

    def _inner(self, x: Tensor) -> Tensor:
        if not self.sizes.dropout or self.seq is None or self.seq.key is None:  # inference has no dropout key
            return functional.linear(x, self.A)
        return DroppedProduct.apply(x, self.A, *self._numbers(x, self.seq), self.sizes.dropout)  # type: ignore[return-value]

    def _numbers(self, x: Tensor, seq: SeqInfo) -> tuple[Tensor, Tensor]:
        """Return the random numbers, for tokens and for channels, from which the dropout mask is computed.

        x is (B, L, D) or (L, B, D), for B rows (sequences), L tokens per row and D input channels. The numbers for
        tokens are (B, L), or transposed if x is (L, B, D). `config/checks` refuses configurations in which B = L, since
        the two shapes could not be distinguished.
        """
        seed = seq.number_for_device(f"dropout/{self.layer}")
        tokens_BL = token_numbers(seed, seq.positions_BL, 0 if seq.shard is None else seq.shard.first)
        channels = channel_numbers(seed, self.sizes.first, self.sizes.inputs, x.device)
        return tokens_BL if x.shape[:2] == tokens_BL.shape else tokens_BL.T.contiguous(), channels


class DroppedProduct(torch.autograd.Function):
    """Computes dropout(x) A^T. It saves x before dropout, and draws the mask again in the backward pass.

    The adapted layer saves the same tensor x, so that saving it here needs no extra memory. `probability` is
    the dropout probability.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, A: Tensor, tokens: Tensor, channels: Tensor, probability: float) -> Tensor:
        ctx.save_for_backward(x, A, tokens, channels)
        ctx.probability = probability
        return functional.linear(dropout(DropoutInputs(x, tokens, channels, probability)), A)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (x, A, tokens, channels) = ctx.saved_tensors
        dx = dA = None
        if ctx.needs_input_grad[0]:  # Megatron all-reduces dx in place, so dx must be contiguous
            dx = dropout(DropoutInputs(grad @ A, tokens, channels, ctx.probability)).contiguous()
        if ctx.needs_input_grad[1]:
            dropped = dropout(DropoutInputs(x, tokens, channels, ctx.probability))
            dA = grad.flatten(0, 1).mT @ dropped.flatten(0, 1)
        return dx, dA, None, None, None


def attach_adapters(
    model: nn.Module, table: Mapping[str, Parameter], adapters: AdaptersConfig | None, tensor: RankGroup
) -> None:
    """Attach an adapter to every adapted linear layer in a model or pipeline stage.

    `table` describes the model's weights, and `tensor` is the tensor-parallel group with this rank's index.
    """
    layers = dict(model.named_modules())
    users = mixers_by_layer(model)
    for name, parts in adapted_projections(table, adapters).items():
        if (layer := layers.get(name.removesuffix(".weight"))) is None:
            continue
        assert adapters is not None
        cut = table[name].cut_over("tensor", tensor.size)
        if cut is not None and cut.axis == 0:
            ranks = tensor.size
        else:
            ranks = 1
        own_parts = [replace(part, rows=part.rows // ranks) for part in parts]
        inputs = table[name].shard_shape({"tensor": tensor.size})[1]
        inside = inputs < table[name].shape[1]
        sizes = AdapterSizes(
            inputs,
            tensor.rank * inputs if inside else 0,
            own_parts,
            adapters.rank,
            adapters.alpha / adapters.rank,
            adapters.dropout,
            adapters.dora,
            tensor if inside else RankGroup(),
        )
        adapter = Adapter(name.removesuffix(".weight"), sizes)
        layer.add_module("adapter", adapter)
        if adapters.dropout:
            for mixer in users[layer]:
                mixer.register_forward_pre_hook(adapter.begin)
        if not getattr(layer, "sums_inside", False):
            layer.register_forward_hook(_add, prepend=True)  # runs before the hook that all-reduces the output


def mixers_by_layer(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Map each module to the mixers that contain it; there are several mixers if they share the module."""
    users: dict[nn.Module, list[nn.Module]] = {}
    for sub_layer in model.get_submodule("layers").children():
        mixer = sub_layer.get_submodule("mixer")
        for layer in mixer.modules():
            users.setdefault(layer, []).append(mixer)
    return users


def adapter_of(layer: nn.Module) -> Adapter | None:
    """Return the adapter attached to a layer, or None."""
    return layer._modules.get("adapter")  # type: ignore[return-value]


def _add(layer: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
    """Add the adapter's output to a linear layer's output, as a forward hook.

    A `BranchingLinear` returns two tensors, its input and its output. For such a layer the hook returns the layer's
    input and its adapted output.
    """
    adapter = adapter_of(layer)
    assert adapter is not None
    if isinstance(out, tuple):
        x, y = out
        return x, adapter(given[0], y, layer.weight)
    return adapter(given[0], out, layer.weight)
