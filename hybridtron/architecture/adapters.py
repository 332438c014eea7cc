"""Low-rank adapters of frozen projections, and their entries in the parameter table.

    y = W x + (alpha / rank) B A x          A (rank, in), B (out, rank)

x is the projection's input, y is its output, and W is its frozen weight. B starts at zero, so that a model with new
adapters computes the same as the model without them.

A projection whose weight fuses several parts (such as k and v in `kv`) has one pair A, B for each adapted part. In
memory, the matrices A of all parts are concatenated along their rows into one tensor, and the matrices B into another.
A checkpoint stores each part's A and B under its own name.

Tensor parallelism shards the adapter like its layer:

    column-parallel    B is sharded along its rows, as W is. Every rank holds the full A, with a partial gradient
    row-parallel       A is sharded along its columns, as W is. Every rank holds the full B, with a partial gradient.
                       The adapter's output is all-reduced together with the layer's own output

With `dora` each row of W + (alpha / rank) B A is rescaled to a learned L2 norm: the norm of W's row plus an entry of
the learned vector M. M starts at zero and is sharded like B's rows (`parallel/dora.py`). In training, `dropout` zeroes
elements in the adapter's input.

The adapters are LoRA's (Hu et al. 2021). The preset `lora_plus` also trains the embedding and the norms (LongLoRA). The
preset `hylora` trains all these and the short convolutions (Expansion Span, section 3.3). If the embedding is tied to
the head, training the embedding also trains the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated

from hybridtron.architecture.base import LayerOwner, Parameter
from hybridtron.architecture.inits import Constant, Uniform
from hybridtron.limits import above, at_least, below_one
from hybridtron.problems import Problem, did_you_mean


class Adapting(StrEnum):
    """Presets that choose the weights to train besides the adapters; TRAINED_WITH_ADAPTERS lists these weights."""

    lora = "lora"
    lora_plus = "lora_plus"
    hylora = "hylora"


TRAINED_WITH_ADAPTERS = {
    Adapting.lora: (),
    Adapting.lora_plus: ("embedding.weight", "*norm*"),
    Adapting.hylora: ("embedding.weight", "*norm*", "*conv*"),
}
"""Name patterns for the weights that each preset trains in addition to the adapters."""

ADAPTERS = "*.adapter.*"
"""Name pattern for all adapter weights."""


@dataclass
class AdaptersConfig:
    """Low-rank adapters for frozen projections, and the weights trained with them."""

    preset: Adapting = (
        Adapting.lora
    )  # weights to train besides the adapters. lora: none; lora_plus: embedding, norms; hylora: these and convolutions
    # name patterns of the adapted projections, or of their parts, such as layers.*.mixer.kv.weight.k
    weights: list[str] = field(default_factory=lambda: [f"layers.*.mixer.{name}.weight" for name in ("q", "kv", "out")])
    rank: Annotated[int, at_least(1)] = 32  # inner width of an adapter
    alpha: Annotated[float, above(0)] = 64.0  # an adapter's output is multiplied by alpha / rank
    # probability that an element of an adapter's input is zeroed in training, independently by layer, token and channel
    dropout: Annotated[float, below_one("such as 0.05")] = 0.0
    dora: bool = False  # learn the norms of a projection's rows separately from their directions (DoRA)

    restart: bool = False  # merge the previous phase's adapters and start new ones, even if the settings are the same

    def continues(self, before: AdaptersConfig | None) -> bool:
        """Return True if a phase with these settings continues to train the previous phase's adapters.

        `before` has the previous phase's settings, or is None if that phase trained no adapters.
        """
        if before is None or self.restart:
            return False
        return all(getattr(self, key) == getattr(before, key) for key in ("weights", "rank", "alpha", "dora"))


def is_adapter(key: str) -> bool:
    """Return True if a checkpoint's key belongs to an adapter: A, B or M, a part of these, or their optimizer state."""
    return ".adapter." in key


def adapter_key(key: str, piece: str) -> str:
    """Return the name of the adapter's tensor `piece` ("A", "B" or "M") for the weight or part named `key`."""
    return re.sub(r"\.weight(?=$|\.)", f".adapter.{piece}", key)


@dataclass(frozen=True)
class AdaptedPart:
    """A part that is fused into a projection's weight.

    `name` is the part's name, `rows` is its row count, and `adapted` is True if it has an adapter. A weight without
    fused parts counts as a single part with an empty name.
    """

    name: str
    rows: int
    adapted: bool


def adapted_projections(
    table: Mapping[str, Parameter], adapters: AdaptersConfig | None
) -> dict[str, tuple[AdaptedPart, ...]]:
    """Return weight name -> parts, for every adapted projection.

    A projection is adapted if at least one of its parts has an adapter. All its parts are returned.
    """
    if adapters is None:
        return {}
    parts_by_weight = {}
    for name, weight in table.items():
        if not weight.is_mixer_projection:
            continue
        parts = tuple(
            AdaptedPart(part, rows, any(fnmatchcase(name, p) or fnmatchcase(key, p) for p in adapters.weights))
            for key, (part, rows) in zip(weight.stored(name), weight.parts or (("", weight.shape[0]),), strict=True)
        )
        if any(part.adapted for part in parts):
            parts_by_weight[name] = parts
    return parts_by_weight


def adapter_rows(table: Mapping[str, Parameter], adapters: AdaptersConfig | None) -> dict[str, Parameter]:
    """Return full name -> parameter for all weights of adapters, such as `layers.1.mixer.kv.adapter.A`."""
    rows = {}
    for name, parts in adapted_projections(table, adapters).items():
        assert adapters is not None
        weight = table[name]
        A, B, M = (adapter_key(name, piece) for piece in "ABM")
        rank = adapters.rank
        chosen = [part for part in parts if part.adapted]
        # by_inputs: tensor-parallel ranks divide the inputs (row-parallel)
        # by_outputs: tensor-parallel ranks divide the outputs (column-parallel)
        by_inputs = any(cut.axis == 1 for cut in weight.cuts)
        by_outputs = any(cut.axis == 0 for cut in weight.cuts)
        treatment = {"fp8": False, "fp32": False, "decay": True, "projection": False, "heads": ()}
        start = Uniform(weight.shape[1] ** -0.5)
        zero = Constant(0.0)
        rows[A] = replace(
            weight,
            shape=(rank * len(chosen), weight.shape[1]),
            init=start,
            grown=start,
            parts=tuple((part.name, rank) for part in chosen) if weight.parts else (),
            cuts=tuple(cut for cut in weight.cuts if cut.axis == 1),
            partial_gradient=by_outputs or (weight.partial_gradient and not by_inputs),
            **treatment,
        )
        rows[B] = replace(
            weight,
            shape=(sum(part.rows for part in chosen), rank),
            init=zero,
            grown=zero,
            parts=tuple((part.name, part.rows) for part in chosen) if weight.parts else (),
            cuts=tuple(cut for cut in weight.cuts if cut.axis == 0),
            partial_gradient=by_inputs or weight.partial_gradient,
            **treatment,
        )
        if adapters.dora:
            rows[M] = replace(rows[B], shape=rows[B].shape[:1], decay=False, fp32=True)
    return rows


def adapter_problems(table: Mapping[str, Parameter], adapters: AdaptersConfig) -> Iterator[Problem]:
    """Yield a problem if `adapters.weights` is empty, and for every pattern in it that matches no projection.

    Without this check, a misspelt pattern would silently adapt nothing. Each problem's key is `weights`, without the
    path of the configuration section that holds the adapters' settings.
    """
    names = []
    projection_names = []
    for name, weight in table.items():
        if weight.is_mixer_projection:
            keys = dict.fromkeys((name, *weight.stored(name)))
            names += keys
            projection_names += [_in_any_layer(key, weight) for key in keys]
    projection_names = list(dict.fromkeys(projection_names))
    if not adapters.weights:
        yield Problem("weights", "missing", f"is empty: name projections; there are {', '.join(projection_names)}")
    for pattern in adapters.weights:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = did_you_mean(pattern, projection_names)
            what = f"has {pattern!r}, which matches no projection{hint}; there are {', '.join(projection_names)}"
            yield Problem("weights", "unknown-name", what)


def _in_any_layer(key: str, weight: Parameter) -> str:
    """Return a weight's name as a pattern for all sub-layers, such as `layers.*.mixer.q.weight`."""
    if isinstance(weight.owner, LayerOwner):
        return key.replace(weight.owner.path, "layers.*", 1)
    return key
