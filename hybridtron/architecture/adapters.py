"""Low-rank adapters of frozen projections, and their rows in the parameter table.

    y = W x + (alpha / rank) B A x          A (rank, in), B (out, rank)

B starts at zero, so that a model with adapters begins as the model without. A projection with fused outputs has one
pair for each part: the rows of all A are concatenated, and so are those of all B, stored under the parts' names.
Column-parallel: every rank holds the full A and gets a partial gradient for it; B is cut as W is. Row-parallel: A is
cut as W is; every rank holds the full B with a partial gradient, and the adapter's output is summed over ranks
together with the layer's own.

With `dora` the lengths of the rows of W + (alpha / rank) B A are learned separately, starting from those of W: M is
their change, cut as B's rows are (`parallel/magnitude.py`). `dropout` is applied to the adapter's input in training.

LoRA: Hu et al. 2021. `lora_plus` also trains embedding and norms (LongLoRA), `hylora` the short convolutions as well
(Expansion Span, section 3.3). A tied embedding that is trained is also the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated

from hybridtron.architecture.base import LayerOwner, ModelOwner, Parameter
from hybridtron.architecture.inits import Constant, Uniform
from hybridtron.limits import above, at_least, below_one
from hybridtron.problems import Problem, did_you_mean


class Adapting(StrEnum):
    """Weights trained in addition to the adapters: none; embedding and norms; or these and the short convolutions."""

    lora = "lora"
    lora_plus = "lora_plus"
    hylora = "hylora"


LEARNING_BESIDE = {
    Adapting.lora: (),
    Adapting.lora_plus: ("embedding.weight", "*norm*"),
    Adapting.hylora: ("embedding.weight", "*norm*", "*conv*"),
}
"""Patterns of the names of weights that each preset trains."""

ADAPTERS = "*.adapter.*"
"""Pattern of all adapter weights' names."""


@dataclass
class AdaptersConfig:
    """Low-rank adapters of frozen projections, and the weights trained with them."""

    preset: Adapting = (
        Adapting.lora
    )  # weights trained too: lora: none; lora_plus: embedding and norms; hylora: also convolutions
    # names of projections, or of their parts, such as layers.*.mixer.kv.weight.k
    weights: list[str] = field(default_factory=lambda: [f"layers.*.mixer.{name}.weight" for name in ("q", "kv", "out")])
    rank: Annotated[int, at_least(1)] = 32  # inner width of an adapter
    alpha: Annotated[float, above(0)] = 64.0  # an adapter's output is multiplied by alpha / rank
    # probability of dropping an adapter's input in training, drawn for each layer, token and channel
    dropout: Annotated[float, below_one("such as 0.05")] = 0.0
    dora: bool = False  # learn the lengths of a projection's rows separately from their directions

    restart: bool = False  # merge the previous phase's adapters and start new ones, even if the settings are the same

    def continues(self, before: AdaptersConfig | None) -> bool:
        """Return True if training continues with the adapters of the previous phase."""
        if before is None or self.restart:
            return False
        return all(getattr(self, key) == getattr(before, key) for key in ("weights", "rank", "alpha", "dora"))


def is_adapter(key: str) -> bool:
    """Return True for names of adapter weights, their parts and their optimizer tensors."""
    return ".adapter." in key


def adapter_key(key: str, piece: str) -> str:
    """Return the checkpoint's name for the A, B or M that adapts this weight or part."""
    return re.sub(r"\.weight(?=$|\.)", f".adapter.{piece}", key)


@dataclass(frozen=True)
class AdaptedPart:
    """Rows of a projection, with their own adapter or without one."""

    name: str
    rows: int
    adapted: bool


def adapted_projections(
    table: Mapping[str, Parameter], adapters: AdaptersConfig | None
) -> dict[str, tuple[AdaptedPart, ...]]:
    """Map the weight name of each projection with adapters to its parts."""
    if adapters is None:
        return {}
    parts_by_weight = {}
    for name, weight in table.items():
        if not is_adaptable(weight):
            continue
        parts = tuple(
            AdaptedPart(part, rows, any(fnmatchcase(name, p) or fnmatchcase(key, p) for p in adapters.weights))
            for key, (part, rows) in zip(weight.stored(name), weight.parts or (("", weight.shape[0]),), strict=True)
        )
        if any(part.adapted for part in parts):
            parts_by_weight[name] = parts
    return parts_by_weight


def is_adaptable(weight: Parameter) -> bool:
    """Return True for the weight of a linear layer in a mixer."""
    return weight.projection and not isinstance(weight.owner, ModelOwner)


def adapter_rows(table: Mapping[str, Parameter], adapters: AdaptersConfig | None) -> dict[str, Parameter]:
    """Return every adapter weight by its full name, such as `layers.1.mixer.kv.adapter.A`."""
    rows = {}
    for name, parts in adapted_projections(table, adapters).items():
        assert adapters is not None
        weight = table[name]
        A, B, M = (adapter_key(name, piece) for piece in "ABM")
        rank = adapters.rank
        chosen = [part for part in parts if part.adapted]
        by_inputs = any(cut.axis == 1 for cut in weight.cuts)
        by_outputs = any(cut.axis == 0 for cut in weight.cuts)
        treatment = {"fp8": False, "fp32": False, "decay": True, "projection": False}
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
    """Yield a problem for every pattern that matches no projection; keys are those of the adapters' section.

    Without this check such a pattern would silently train nothing.
    """
    names = []
    projection_names = []
    for name, weight in table.items():
        if is_adaptable(weight):
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
