"""Rules for models with experts: settings that the routed experts do not support.

The weights of all routed experts are one three-dimensional parameter, which no linear layer reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridtron.architecture.moe import MoESpec
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.update_rule import update_rule
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.problems import Problem


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
