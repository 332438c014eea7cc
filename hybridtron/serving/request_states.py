"""States that a server keeps for each request: their shapes and types, as mixers declare them, and their storage.

A server has one tensor for each part of a state, with a slot for each request on its first axis.

    FixedState      a recurrence, a convolution's last inputs, a token shift
    GrowingState    attention that the server itself can't compute, such as attention with short convolutions. Keys,
                    values and other parts grow with the request; a slot is large enough for the longest request

Legend: B requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from hybridtron.hf.mixers_hybridtron import MIXERS, Heads, ModelSizes, State, StatePart

SIZES = "sizes"  # part of a growing state: the length in use of every other part


@dataclass(frozen=True)
class FixedState:
    """A state whose parts have fixed sizes. `parts` gives each part's shape for one request, and its type."""

    parts: dict[str, tuple[tuple[int, ...], torch.dtype]]
    together: ClassVar[bool] = True  # one call of the mixer computes several requests with equally many tokens

    @property
    def bytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.parts.values())

    def read(self, caches: Sequence[Tensor], slots_B: Tensor, fresh_B: Tensor) -> State:
        """Return the states of some requests. Those of fresh requests are zeros, whatever their slots hold."""
        state = {}
        for name, cache in zip(self.parts, caches, strict=True):
            fresh = fresh_B.view(-1, *[1] * (cache.ndim - 1))
            state[name] = cache[slots_B].masked_fill(fresh, 0)
        return state

    def write(self, caches: Sequence[Tensor], slots_B: Tensor, state: State) -> None:
        """Replace the states of some requests."""
        for name, cache in zip(self.parts, caches, strict=True):
            cache[slots_B] = state[name].to(cache.dtype)


class GrowingState(FixedState):
    """A state whose parts grow along their first axis; `parts` has their shapes for the longest request."""

    together: ClassVar[bool] = False

    def read(self, caches: Sequence[Tensor], slots_B: Tensor, fresh_B: Tensor) -> State:
        """Return the state of one request, or no state if the request is fresh."""
        if fresh_B.item():
            return {}
        slot = int(slots_B)
        named = dict(zip(self.parts, caches, strict=True))
        sizes = named.pop(SIZES)[slot].tolist()
        state = {}
        for (name, cache), size in zip(named.items(), sizes, strict=True):
            part = cache[slot : slot + 1]
            state[name] = part[:, :size] if part.ndim > 1 else part
        return state

    def write(self, caches: Sequence[Tensor], slots_B: Tensor, state: State) -> None:
        """Replace the state of one request."""
        slot = int(slots_B)
        named = dict(zip(self.parts, caches, strict=True))
        sizes = named.pop(SIZES)[slot]
        for index, (name, cache) in enumerate(named.items()):
            part = state[name][0]
            if part.ndim == 0:
                cache[slot] = part
                continue
            cache[slot, : len(part)] = part
            sizes[index] = len(part)


def state_of(config: Any, index: int, dtype: torch.dtype, longest: int) -> FixedState:
    """Return a sub-layer's state. It has no parts if a server keeps the sub-layer's keys and values in pages.

    dtype: the type of parts for which the mixer declares none
    longest: the largest number of tokens in a request
    """
    options = dict(config.layers[config.pattern[index]])
    make_spec, make_mixer = MIXERS[options.pop("kind")]
    spec = make_spec(**make_spec.renamed(options))
    kinds = [config.layers[letter]["kind"] for letter in config.pattern]
    sizes = ModelSizes(config.hidden_size, len(kinds)).at(index, kinds)
    if not issubclass(make_mixer, Heads):
        return FixedState(_shapes(spec.state_parts(sizes), dtype))
    if in_pages(spec):
        return FixedState({})
    parts = attention_parts(spec, sizes, longest)
    shapes = _shapes(parts, dtype)
    return GrowingState({SIZES: ((len(shapes),), torch.int64), **shapes})


def largest_state(config: Any, dtype: torch.dtype, longest: int) -> FixedState:
    """Return the largest state among the sub-layers."""
    states = (state_of(config, index, dtype, longest) for index in range(len(config.pattern)))
    return max(states, key=lambda state: state.bytes)


def in_pages(spec: Any) -> bool:
    """Return True if a server's own attention can compute this: its state has keys and values only."""
    reads_all = getattr(spec, "eval", "full") == "full"
    return reads_all and not spec.conv and getattr(spec, "self_extend", None) is None


def attention_parts(spec: Any, sizes: ModelSizes, longest: int) -> dict[str, StatePart]:
    """Return the parts of an attention sub-layer's state, for a request of `longest` tokens."""
    parts = spec.carried_heads(sizes, longest)
    if getattr(spec, "eval", "full") == "span" and spec.asks:
        heads = spec.heads, spec.head(sizes)
        num_sums = spec.carried_blocks(None)[1]
        parts["queries"] = StatePart("kv", (spec.block - 1, *heads))
        parts["summaries"] = StatePart("kv", (longest // spec.block, *heads), "float32")
        parts["sums"] = StatePart("kv", (num_sums, *heads), "float32")
    return parts


def _shapes(parts: dict[str, StatePart], dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return each part's shape and type, wide types first, since servers may pack parts without gaps."""
    shapes = {}
    for name, part in parts.items():
        shape = cast("tuple[int, ...]", part.shape)  # every axis has a size, that of the longest request
        shapes[name] = shape, dtype if part.dtype is None else getattr(torch, part.dtype)
    return dict(sorted(shapes.items(), key=lambda item: item[1][1].itemsize, reverse=True))
