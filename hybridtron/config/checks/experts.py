"""Rules for models with experts: settings that the routed experts do not support.

The weights of all routed experts are one three-dimensional parameter, which no linear layer reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridtron.architecture.moe import MoESpec
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.update_rule import update_rule
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.problems import Problem

GROUPED_MULTIPLE = 8  # grouped products take bf16 channels in multiples


def expert_problems(phase: ResolvedPhase) -> Iterator[Problem]:
    """List settings that can't be honoured in a model with experts."""
    if phase.parsed is None:
        return
    letters = [letter for letter, spec in phase.arch.by_letter.items() if isinstance(spec, MoESpec)]
    if not letters:
        return
    has = f"but model.pattern has experts ({', '.join(letters)})"
    if phase.precision.name in FP8_MULTIPLES:
        message = f"is {phase.precision.name}, {has}, whose products are not in FP8: use precision=bf16"
        yield Problem("precision.name", "unsupported", message)
    if phase.optim.name in OPTIMIZERS and update_rule(phase.optim).matrix_stage is not None:
        message = f"is {phase.optim.name}, {has}, whose matrices it does not separate: use optim.name=adamw"
        yield Problem("optim.name", "unsupported", message)
    if phase.config.run.compile:
        message = f"is true, {has}, whose routing can't be compiled: use run.compile=false"
        yield Problem("run.compile", "unsupported", message)


def expert_warnings(phases: Sequence[ResolvedPhase]) -> list[str]:
    """Return a sentence for each size with which a GPU computes the experts' products one after the other.

    The host then waits for the experts' loads in each layer. The phases must have passed `check`.
    """
    sizes: dict[str, int] = {}
    for phase in phases:
        tensor = phase.config.parallel.tensor
        if phase.precision.name != "bf16":
            continue
        for letter, spec in phase.arch.by_letter.items():
            if isinstance(spec, MoESpec):
                sizes["model.width"] = phase.model.width
                sizes[phase.key(f"model.layers.{letter}.hidden") + " / parallel.tensor"] = spec.hidden // tensor
    return [
        f"{name} is {size}, not a multiple of {GROUPED_MULTIPLE}: on a GPU, experts run one after the other, "
        "and the host waits in each layer with experts"
        for name, size in sizes.items()
        if size % GROUPED_MULTIPLE
    ]
