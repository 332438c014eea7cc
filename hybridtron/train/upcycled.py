"""Start of a model with experts from a dense model (upcycling): each expert starts as a copy of the dense MLP.

A sub-layer is upcycled if it has experts, and the checkpoint has a dense MLP in the same sub-layer. With w_k the
weights of a token's experts, the new sub-layer's first output is

    sum_k w_k copy(u) = (sum_k w_k) dense(u)

So the down projections of copies are divided by the sum that routing by equal scores gives: `scale` with `normalise`,
else `scale` times `top_k` / `experts` (softmax) or `scale` times `top_k` / 2 (sigmoid). With `normalise`, every token
has this sum, and the first logits are those of the dense model, apart from rounding. Without it, the sum depends on
the token. The router then starts 100 times smaller than usual, so that all scores are nearly equal, and the first
logits are near those of the dense model. A new shared expert starts with zeros in its down projection, so it adds
nothing.

A run is refused if it never trains the experts, which would stay equal, or never trains the router, which would stay as
random as it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from hybridtron.architecture.base import MixerSpec, Parameter
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.squared_relu import SquaredReLUSpec
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.model.init import starting_value
from hybridtron.ops.precision import at_least_fp32
from hybridtron.problems import Problem

SMALLER_ROUTER = 0.01  # factor of a router whose weights do not sum to the same value for all tokens
DENSE_WEIGHTS = {"gate_up": "gate_up.weight", "down": "down.weight"}
UNGATED_WEIGHTS = {"gate_up": "up.weight", "down": "down.weight"}


@dataclass(frozen=True)
class UpcycledLayer:
    """A sub-layer with experts that start as copies of a dense MLP.

    index: the sub-layer's index in the model
    letter: the sub-layer's letter in the new model
    spec: the options of the experts
    dense: the options of the checkpoint's MLP
    """

    index: int
    letter: str
    spec: MoESpec
    dense: SwiGLUSpec | SquaredReLUSpec

    @property
    def prefix(self) -> str:
        """Prefix of the weights of the sub-layer's mixer."""
        return f"layers.{self.index}.mixer."

    @property
    def expected_sum(self) -> float:
        """Sum of the weights of a token's experts if all scores are equal."""
        spec = self.spec
        if spec.normalise:
            return spec.scale
        if spec.scores == "softmax":
            return spec.scale * spec.top_k / spec.experts
        return spec.scale * spec.top_k / 2

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each option with which experts can't start as copies of the dense MLP."""
        where = f"model.layers.{self.letter}"
        copies = "experts can't start as copies of the checkpoint's MLP"
        if self.spec.hidden != self.dense.hidden:
            what = f"is {self.spec.hidden}, but the MLP has {self.dense.hidden} inner channels, so {copies}"
            yield Problem(f"{where}.hidden", "mismatch", f"{what}: use {self.dense.hidden}, or leave run.weights out")
        if self.spec.activation != self.dense.kind:
            what = f"is {self.spec.activation}, but the MLP is {self.dense.kind}, so {copies}"
            yield Problem(f"{where}.activation", "mismatch", f"{what}: use {self.dense.kind}")
        if self.spec.latent:
            what = f"is {self.spec.latent}, but the MLP has the model's width, so {copies}"
            yield Problem(f"{where}.latent", "mismatch", f"{what}: leave it out")
        factor = getattr(self.dense, "gate_multiplier", 1.0)
        if factor != 1.0:
            what = f"is moe, which has no gate_multiplier, but the MLP has {factor}, so {copies}"
            yield Problem(f"{where}.kind", "unsupported", f"{what}: leave run.weights out")

    def value(self, name: str, parameter: Parameter, seed: int, stored: Callable[[str], Tensor]) -> Tensor:
        """Return a full weight's initial value.

        name: the weight's full name
        parameter: the weight's entry in the new model's table
        stored: a function that takes the name of a dense weight and returns its value
        """
        key = name.removeprefix(self.prefix)
        names = DENSE_WEIGHTS if self.spec.activation == "swiglu" else UNGATED_WEIGHTS
        if key in names:
            matrix = stored(self.prefix + names[key])
            if key == "down":
                matrix = at_least_fp32(matrix) / self.expected_sum
            return matrix.expand(parameter.shape)
        if key == "shared_down.weight":
            return torch.zeros(parameter.shape)
        start = starting_value(parameter.init, parameter.shape, seed, name)
        if key == "router" and not self.spec.normalise:
            return start * SMALLER_ROUTER
        return start


def upcycled_layers(stored: Architecture, arch: Architecture) -> list[UpcycledLayer]:
    """Return the sub-layers of `arch` with experts for which a checkpoint's model, `stored`, has a dense MLP."""
    if len(stored.specs) != len(arch.specs):
        return []
    return [
        UpcycledLayer(index, arch.letters[index], spec, dense)
        for index, (spec, dense) in enumerate(zip(arch.specs, stored.specs, strict=True))
        if isinstance(spec, MoESpec) and isinstance(dense, SwiGLUSpec | SquaredReLUSpec)
    ]


def frozen_problems(layers: Sequence[UpcycledLayer], plan: RunPlan) -> Iterator[Problem]:
    """Yield a problem for each letter whose upcycled router or experts no phase trains."""
    # a phase with init_from replaces all weights, so only the phases before it train these layers
    phases = list(takewhile(lambda phase: phase.settings.init_from is None, plan.phases))
    first = plan.phases[0]
    key = first.own_key("train") if first.model.adapters is None else first.key("model.adapters")
    for letter, of_letter in by_letter(layers).items():
        if not all(_is_trained(("gate_up", "down"), layer, phases) for layer in of_letter):
            what = f"freezes experts of {letter}, which no later phase trains, so that they stay equal copies of the "
            what += "checkpoint's MLP"
        elif not all(_is_trained(("router",), layer, phases) for layer in of_letter):
            what = f"freezes a router of {letter}, which no later phase trains, so that it stays as random as it starts"
        else:
            continue
        cure = "add layers.*.mixer.router, layers.*.mixer.gate_up and layers.*.mixer.down to "
        cure += f"{first.own_key('train')}, or keep the checkpoint's MLP"
        yield Problem(key, "no-effect", f"{what}: {cure}")


def _is_trained(names: Sequence[str], layer: UpcycledLayer, phases: Sequence[ResolvedPhase]) -> bool:
    """Return whether a phase trains one of a sub-layer's weights with these names."""
    return any(phase.learns(layer.prefix + name) for phase in phases for name in names)


def by_letter(layers: Sequence[UpcycledLayer]) -> dict[str, list[UpcycledLayer]]:
    """Return letter -> its upcycled sub-layers."""
    groups: dict[str, list[UpcycledLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.letter, []).append(layer)
    return groups


def as_if_dense(arch: Architecture, layers: list[UpcycledLayer]) -> Architecture:
    """Return the new model with the dense MLPs in upcycled sub-layers, to compare its weights with the checkpoint's."""
    specs: list[MixerSpec] = list(arch.specs)
    for layer in layers:
        placed = {name: getattr(layer.spec, name) for name in ("norm_after", "beside", "output_multiplier")}
        specs[layer.index] = replace(layer.dense, **placed)
    return replace(arch, specs=tuple(specs), base=None)  # muP changes no shape


def upcycling_lines(layers: list[UpcycledLayer]) -> list[str]:
    """Return a line for each letter with upcycled sub-layers: how its experts start."""
    lines = []
    for letter, of_letter in by_letter(layers).items():
        spec = of_letter[0].spec
        where = ", ".join(str(layer.index) for layer in of_letter)
        line = f"{letter}: each of {spec.experts} experts starts as a copy of the dense MLP, in layers {where}"
        if not spec.normalise:
            line += "; without normalise, the first logits are only near the dense model's"
        if spec.shared:
            line += "; the shared expert adds nothing at first"
        lines.append(line)
    return lines
