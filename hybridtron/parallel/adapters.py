"""What low-rank adapters compute, beside any of the linear layers (rows and cuts: `architecture/adapters.py`).

A layer adds its adapter's outputs to its own before these are summed over ranks, so that both are summed at once.
Mixers do not know of them: an adapter is attached to a layer when the model is built. What dropout leaves out is a
function of the micro-batch's key, the layer's name, the token and the channel among those of all ranks: every layout
draws the same, and so does a pass that runs again. An adapter learns of the micro-batch as its mixer is called.
With DoRA it multiplies the layer's outputs, too (`magnitude.py`): each rank its own part of them, before the sum.
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
from hybridtron.parallel.cut import RankGroup
from hybridtron.parallel.magnitude import factors, row_lengths


@dataclass(frozen=True)
class AdapterSizes:
    """Of one rank's share of an adapter: its inputs, the parts of its outputs, and what these are multiplied by.

    `first` is the first of its inputs among those of all ranks, and `sharing` are the ranks that share these.
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
    """Adds scale B A x to each part of a layer's outputs that has a pair of its own, and scales it with DoRA."""

    def __init__(self, layer: str, sizes: AdapterSizes) -> None:
        super().__init__()
        self.layer, self.sizes = layer, sizes
        rows = self._rows()
        self.A = nn.Parameter(torch.empty(len(rows) * sizes.rank, sizes.inputs))
        self.B = nn.Parameter(torch.empty(sum(rows), sizes.rank))
        self.M = nn.Parameter(torch.empty(sum(rows))) if sizes.dora else None
        self.seq: SeqInfo | None = None  # of the pass under way

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """What a layer's output y becomes, whose input and weight these are."""
        y = y + self.added(x)
        return y if self.M is None else (y * self._factors(self.M, weight)).to(y.dtype)

    def added(self, x: Tensor) -> Tensor:
        """scale B A x; zeros for the parts without a pair."""
        inner = (self._inner(x) * self.sizes.scale).split(self.sizes.rank, -1)
        pairs = zip(inner, self.B.split(self._rows()), strict=True)
        made = [
            functional.linear(*next(pairs)) if part.adapted else x.new_zeros(*x.shape[:-1], part.rows)
            for part in self.sizes.parts
        ]
        return made[0] if len(made) == 1 else torch.cat(made, -1)

    def begin(self, _mixer: nn.Module, given: tuple[Any, ...]) -> None:
        """Before each pass of the mixer, also one that runs again: which tokens it reads."""
        *_, self.seq = given

    def _rows(self) -> list[int]:
        return [part.rows for part in self.sizes.parts if part.adapted]

    def _factors(self, M: Tensor, weight: Tensor) -> Tensor:
        """DoRA's, of all outputs; 1 for the parts without a pair."""
        sizes, rows = self.sizes, self._rows()
        pieces = zip(self.A.split(sizes.rank), self.B.split(rows), M.split(rows), strict=True)
        made = []
        for part, of_part in zip(sizes.parts, weight.split([part.rows for part in sizes.parts]), strict=True):
            if not part.adapted:
                made.append(M.new_ones(part.rows))
                continue
            A, B, M_part = next(pieces)
            made.append(factors(M_part, *row_lengths(of_part, A, B, sizes.scale, sizes.sharing)))
        return torch.cat(made)

    def _inner(self, x: Tensor) -> Tensor:
        if not self.sizes.dropout or self.seq is None or self.seq.key is None:  # outside training nothing is drawn
            return functional.linear(x, self.A)
        return DroppedProduct.apply(x, self.A, *self._numbers(x, self.seq), self.sizes.dropout)  # type: ignore[return-value]

    def _numbers(self, x: Tensor, seq: SeqInfo) -> tuple[Tensor, Tensor]:
        """Of tokens and channels; layers read tokens and rows in either order (`config/checks` sees to it that both
        are not as many)."""
        seed = seq.number(f"dropout/{self.layer}")
        tokens_BL = token_numbers(seed, seq.positions_BL, 0 if seq.share is None else seq.share.first)
        channels = channel_numbers(seed, self.sizes.first, self.sizes.inputs, x.device)
        return tokens_BL if x.shape[:2] == tokens_BL.shape else tokens_BL.T.contiguous(), channels


class DroppedProduct(torch.autograd.Function):
    """dropout(x) A^T. For the backward pass x is kept as it came, which other layers keep too: it is drawn again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, A: Tensor, tokens: Tensor, channels: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(x, A, tokens, channels)
        ctx.share = share
        return functional.linear(dropout(DropoutInputs(x, tokens, channels, share)), A)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, A, tokens, channels) = grads, ctx.saved_tensors
        dx = dA = None
        if ctx.needs_input_grad[0]:  # Megatron sums over ranks in place, which must not be a copy
            dx = dropout(DropoutInputs(grad @ A, tokens, channels, ctx.share)).contiguous()
        if ctx.needs_input_grad[1]:
            dropped = dropout(DropoutInputs(x, tokens, channels, ctx.share))
            dA = grad.flatten(0, 1).mT @ dropped.flatten(0, 1)
        return dx, dA, None, None, None


def attach_adapters(
    model: nn.Module, table: Mapping[str, Parameter], adapters: AdaptersConfig | None, tensor: RankGroup
) -> None:
    """Beside the layers of a model, or of a part of it, on one of the tensor-parallel ranks.

    From then on a layer adds its adapter's outputs to its own.
    """
    layers = dict(model.named_modules())
    users = mixers_by_layer(layers)
    for name, parts in adapted_projections(table, adapters).items():
        if (layer := layers.get(name.removesuffix(".weight"))) is None:
            continue
        assert adapters is not None
        cut = table[name].cut_over("tensor", tensor.size)
        ranks = tensor.size if cut is not None and cut.axis == 0 else 1
        own = [replace(part, rows=part.rows // ranks) for part in parts]
        inputs = table[name].share_shape({"tensor": tensor.size})[1]
        inside = inputs < table[name].shape[1]
        sizes = AdapterSizes(
            inputs,
            tensor.rank * inputs if inside else 0,
            own,
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


def mixers_by_layer(modules: Mapping[str, nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """The mixers that use each layer: several where places of a letter share it."""
    found: dict[nn.Module, list[nn.Module]] = {}
    for name, mixer in modules.items():
        if name.startswith("layers.") and name.count(".") == 2 and name.endswith(".mixer"):
            for layer in mixer.modules():
                found.setdefault(layer, []).append(mixer)
    return found


def adapter_of(layer: nn.Module) -> Adapter | None:
    """The adapter that is attached to a layer, if there is one."""
    return layer._modules.get("adapter")  # type: ignore[return-value]


def _add(layer: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
    """To the product; `BranchingLinear` hands out its input before it."""
    adapter = adapter_of(layer)
    assert adapter is not None
    if isinstance(out, tuple):
        x, y = out
        return x, adapter(given[0], y, layer.weight)
    return adapter(given[0], out, layer.weight)
