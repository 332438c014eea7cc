"""Low-rank adapters (LoRA, DoRA) for the linear layers; `architecture/adapters.py` has their shapes and cuts.

An adapter is attached to a layer when the model is built, so mixers need not know about it. The layer adds the
adapter's outputs to its own before it sums over tensor-parallel ranks, so one sum serves both. With DoRA each rank
also scales its own partial outputs before that sum (`magnitude.py`).

The dropout mask is a function of the micro-batch's key, the layer's name, the token and the global channel. Every
layout therefore draws the same mask, and so does a recomputed forward pass. A hook on the mixer passes the
micro-batch's `SeqInfo` to the adapter.
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
from hybridtron.parallel.magnitude import factors, row_lengths
from hybridtron.parallel.mesh import RankGroup


@dataclass(frozen=True)
class AdapterSizes:
    """Sizes of one rank's shard of an adapter: inputs, output parts, rank, scale and options.

    `first` is the global index of the shard's first input channel. `sharing` holds the ranks that divide the inputs
    among them; it has size 1 where every rank has all inputs.
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
    """Adds scale B A x to each adapted part of a layer's outputs; with DoRA it also rescales the output rows."""

    def __init__(self, layer: str, sizes: AdapterSizes) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = sizes
        rows = self._rows()
        self.A = nn.Parameter(torch.empty(len(rows) * sizes.rank, sizes.inputs))
        self.B = nn.Parameter(torch.empty(sum(rows), sizes.rank))
        if sizes.dora:
            self.M = nn.Parameter(torch.empty(sum(rows)))
        else:
            self.M = None
        self.seq: SeqInfo | None = None  # set by `begin` for the current forward pass

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the adapted output of a layer with input x, output y and this weight."""
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
        """Store the `SeqInfo` of the pass; a forward pre-hook of the mixer, called again when a pass is recomputed."""
        *_, self.seq = given

    def _rows(self) -> list[int]:
        return [part.rows for part in self.sizes.parts if part.adapted]

    def _factors(self, M: Tensor, weight: Tensor) -> Tensor:
        """Return DoRA's factor of every output channel; 1 for the parts that are not adapted."""
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
        if not self.sizes.dropout or self.seq is None or self.seq.key is None:  # no dropout outside training
            return functional.linear(x, self.A)
        return DroppedProduct.apply(x, self.A, *self._numbers(x, self.seq), self.sizes.dropout)  # type: ignore[return-value]

    def _numbers(self, x: Tensor, seq: SeqInfo) -> tuple[Tensor, Tensor]:
        """Return the random numbers of tokens and channels that decide the dropout mask.

        A layer's input is (B, L, D) or (L, B, D), so its shape decides whether the token numbers are transposed.
        `config/checks` refuses configurations with B = L, where the two could not be distinguished.
        """
        seed = seq.number(f"dropout/{self.layer}")
        tokens_BL = token_numbers(seed, seq.positions_BL, 0 if seq.share is None else seq.share.first)
        channels = channel_numbers(seed, self.sizes.first, self.sizes.inputs, x.device)
        return tokens_BL if x.shape[:2] == tokens_BL.shape else tokens_BL.T.contiguous(), channels


class DroppedProduct(torch.autograd.Function):
    """Product dropout(x) A^T that saves x undropped and draws the mask again in the backward pass.

    Other layers save the same x, so it costs no extra memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, A: Tensor, tokens: Tensor, channels: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(x, A, tokens, channels)
        ctx.share = share
        return functional.linear(dropout(DropoutInputs(x, tokens, channels, share)), A)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (x, A, tokens, channels) = ctx.saved_tensors
        dx = dA = None
        if ctx.needs_input_grad[0]:  # Megatron all-reduces in place, so this must be contiguous
            dx = dropout(DropoutInputs(grad @ A, tokens, channels, ctx.share)).contiguous()
        if ctx.needs_input_grad[1]:
            dropped = dropout(DropoutInputs(x, tokens, channels, ctx.share))
            dA = grad.flatten(0, 1).mT @ dropped.flatten(0, 1)
        return dx, dA, None, None, None


def attach_adapters(
    model: nn.Module, table: Mapping[str, Parameter], adapters: AdaptersConfig | None, tensor: RankGroup
) -> None:
    """Attach an adapter to every adapted layer in a model or pipeline stage, for one tensor-parallel rank.

    From then on such a layer adds its adapter's outputs to its own.
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
        inputs = table[name].share_shape({"tensor": tensor.size})[1]
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
            layer.register_forward_hook(_add, prepend=True)  # before the hook that sums over ranks


def mixers_by_layer(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Map each layer to the mixers that use it; several if sub-layers share its weights."""
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
    """Add the adapter's output to a layer's product; a forward hook.

    `BranchingLinear` returns its input before the product, and the input passes through unchanged.
    """
    adapter = adapter_of(layer)
    assert adapter is not None
    if isinstance(out, tuple):
        x, y = out
        return x, adapter(given[0], y, layer.weight)
    return adapter(given[0], out, layer.weight)
