"""Low-rank adapters: what learns beside projections that are frozen, and their rows in the table of weights.

    y = W x + (alpha / rank) B A x          A (rank, in), B (out, rank)

B starts at zero, so that a model with adapters begins as the one without. A projection whose outputs are fused has a
pair for each of its parts: A's rows stand one below the other, and so do B's, under the names of the parts.
Column-parallel: A is whole on every rank and gets a part of its gradient there, B is cut as W is. Row-parallel: A is
cut as W is, B is whole with a part of its gradient; what it adds is summed over ranks with the layer's own output.

With `dora` the rows of W + (alpha / rank) B A have lengths that are learned by themselves, those of W at first: M is
what they have changed by, cut as B's rows are (`parallel/magnitude.py`). With `dropout` training leaves out a share of
x on the adapter's way, and enlarges the rest.

LoRA: Hu et al. 2021. `lora_plus` also trains embedding and norms (LongLoRA), `hylora` the short convolutions besides
(Expansion Span, section 3.3). A tied embedding that learns is the head too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated

from hybridtron.architecture.base import Parameter
from hybridtron.architecture.inits import Constant, Uniform
from hybridtron.limits import above, at_least, below_one
from hybridtron.problems import Problem, did_you_mean


class Adapting(StrEnum):
    """What learns beside the adapters: nothing; embedding and norms; or these and the short convolutions."""

    lora = "lora"
    lora_plus = "lora_plus"
    hylora = "hylora"


LEARNING_BESIDE = {
    Adapting.lora: (),
    Adapting.lora_plus: ("embedding.weight", "*norm*"),
    Adapting.hylora: ("embedding.weight", "*norm*", "*conv*"),
}
"""Names of weights, as patterns."""

ADAPTERS = "*.adapter.*"
"""The names of all adapters' weights."""


@dataclass
class AdaptersConfig:
    """Low-rank adapters beside frozen projections, and what learns with them."""

    preset: Adapting = (
        Adapting.lora
    )  # what learns besides: lora: nothing; lora_plus: embedding, norms; hylora: convs too
    # names of projections, or of their parts, such as layers.*.mixer.kv.weight.k
    weights: list[str] = field(default_factory=lambda: [f"layers.*.mixer.{name}.weight" for name in ("q", "kv", "out")])
    rank: Annotated[int, at_least(1)] = 32  # inner width of an adapter
    alpha: Annotated[float, above(0)] = 64.0  # what an adapter adds is multiplied by alpha / rank
    # share of an adapter's inputs that a step of training leaves out, drawn for each layer, token and channel
    dropout: Annotated[float, below_one("such as 0.05")] = 0.0
    dora: bool = False  # the lengths of a projection's rows learn by themselves, beside their directions

    restart: bool = False  # merge those of the phase before and begin others, though they are the same

    def continues(self, before: AdaptersConfig | None) -> bool:
        """Whether these are the adapters that the phase before has trained."""
        if before is None or self.restart:
            return False
        return all(getattr(self, key) == getattr(before, key) for key in ("weights", "rank", "alpha", "dora"))


def is_adapter(key: str) -> bool:
    """Whether this is the name of an adapter's weight, or of a part of one, or of what an optimizer keeps of it."""
    return ".adapter." in key


def adapter_key(key: str, piece: str) -> str:
    """What a checkpoint calls A, B or M beside a projection, or beside a part of one."""
    return re.sub(r"\.weight(?=$|\.)", f".adapter.{piece}", key)


@dataclass(frozen=True)
class AdaptedPart:
    """Rows of a projection, with an adapter of their own or without one."""

    name: str
    rows: int
    adapted: bool


def adapted_projections(
    table: Mapping[str, Parameter], adapters: AdaptersConfig | None
) -> dict[str, tuple[AdaptedPart, ...]]:
    """The projections that have adapters, by the names of their weights, part by part."""
    if adapters is None:
        return {}
    found = {}
    for name, weight in table.items():
        if not is_projection(name, weight):
            continue
        parts = tuple(
            AdaptedPart(part, rows, any(fnmatchcase(name, p) or fnmatchcase(key, p) for p in adapters.weights))
            for key, (part, rows) in zip(weight.stored(name), weight.parts or (("", weight.shape[0]),), strict=True)
        )
        if any(part.adapted for part in parts):
            found[name] = parts
    return found


def is_projection(name: str, weight: Parameter) -> bool:
    """Whether a weight is that of a linear layer of a mixer."""
    return ".mixer." in name and name.endswith(".weight") and len(weight.shape) == 2


def adapter_rows(table: Mapping[str, Parameter], adapters: AdaptersConfig | None) -> dict[str, Parameter]:
    """Every weight of the adapters, by its full name: `layers.1.mixer.kv.adapter.A`."""
    rows = {}
    for name, parts in adapted_projections(table, adapters).items():
        assert adapters is not None
        weight, where, rank = table[name], name.removesuffix("weight") + "adapter", adapters.rank
        chosen = [part for part in parts if part.adapted]
        by_inputs = any(cut.axis == 1 for cut in weight.cuts)
        by_outputs = any(cut.axis == 0 for cut in weight.cuts)
        kept = {"fp8": False, "fp32": False, "decay": True}
        start, zero = Uniform(weight.shape[1] ** -0.5), Constant(0.0)
        rows[f"{where}.A"] = replace(
            weight,
            shape=(rank * len(chosen), weight.shape[1]),
            init=start,
            grown=start,
            parts=tuple((part.name, rank) for part in chosen) if weight.parts else (),
            cuts=tuple(cut for cut in weight.cuts if cut.axis == 1),
            partial_gradient=by_outputs or (weight.partial_gradient and not by_inputs),
            **kept,
        )
        rows[f"{where}.B"] = replace(
            weight,
            shape=(sum(part.rows for part in chosen), rank),
            init=zero,
            grown=zero,
            parts=tuple((part.name, part.rows) for part in chosen) if weight.parts else (),
            cuts=tuple(cut for cut in weight.cuts if cut.axis == 0),
            partial_gradient=by_inputs or weight.partial_gradient,
            **kept,
        )
        if adapters.dora:
            B = rows[f"{where}.B"]
            rows[f"{where}.M"] = replace(B, shape=B.shape[:1], decay=False, fp32=True)
    return rows


def adapter_problems(table: Mapping[str, Parameter], adapters: AdaptersConfig) -> Iterator[Problem]:
    """Patterns that name nothing would train nothing, without a word; keys are those of the adapters."""
    projections = {name: weight for name, weight in table.items() if is_projection(name, weight)}
    names = [key for name, weight in projections.items() for key in dict.fromkeys((name, *weight.stored(name)))]
    there = list(dict.fromkeys(re.sub(r"^layers\.\d+\.", "layers.*.", name) for name in names))
    if not adapters.weights:
        yield Problem("weights", f"is empty: name projections; there are {', '.join(there)}")
    for pattern in adapters.weights:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = did_you_mean(pattern, there)
            what = f"has {pattern!r}, which is the name of no projection{near}; there are {', '.join(there)}"
            yield Problem("weights", what)
