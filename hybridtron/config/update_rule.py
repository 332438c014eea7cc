"""Build the configured optimizer, and check the settings that depend on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.choices import LrPiece
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import OptimConfig
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.optimizers.base import UpdateRule
from hybridtron.problems import Problem


def update_rule(optim: OptimConfig) -> UpdateRule:
    """Return the optimizer that `optim.name` names, with the options in `optim.NAME` if this section exists."""
    rule: Any = OPTIMIZERS[optim.name]
    options = getattr(optim, optim.name, None)
    if options is None:
        return rule()
    return rule(options)


def same_update_rule(one: OptimConfig, other: OptimConfig) -> bool:
    """Return True if two sections name the same optimizer with the same options."""
    return one.name == other.name and getattr(one, one.name, None) == getattr(other, one.name, None)


def unread_problems(optim: OptimConfig, phase: ResolvedPhase | None = None) -> Iterator[Problem]:
    """Yield a problem for each key that differs from its default although the optimizer does not read it.

    If `phase` is given, `optim` is the phase's section. A key that the phase itself sets is reported even if its value
    is the default.
    """
    rule = OPTIMIZERS.get(optim.name)
    if rule is None:
        return  # `limit_problems` reports an unknown optimizer
    keys = dict.fromkeys(key for other in OPTIMIZERS.values() for key in sorted(other.reads))
    for key in keys:
        if key in rule.reads:
            continue
        readers = " or ".join(name for name, other in OPTIMIZERS.items() if key in other.reads)
        for unread, value, default in _values(f"optim.{key}", getattr(optim, key), getattr(OptimConfig(), key)):
            key_as_set = unread if phase is None else phase.key(unread)
            name = "optim.name"
            if phase is not None and key_as_set != unread:
                name = phase.key(name)
            elif value == default:
                continue
            why = f"but {name}={optim.name} does not read it"
            yield Problem(key_as_set, "no-effect", f"is {value}, {why}: leave it out, or use {name}={readers}")


def transfer_problems(optim: OptimConfig, model: ModelConfig) -> Iterator[Problem]:
    """Yield a problem if the model uses muP but the optimizer does not support it."""
    rule = OPTIMIZERS.get(optim.name)
    if rule is None or rule.supports_mup or model.mup.base_width is None:
        return
    able = " or ".join(name for name, other in OPTIMIZERS.items() if other.supports_mup)
    yield Problem(
        "optim.name",
        "conflict",
        f"is {optim.name}, but model.mup has no learning rates for it: use optim.name={able}, or leave model.mup out",
    )


def unread_by_phases(phases: Sequence[ResolvedPhase]) -> Iterator[Problem]:
    """Yield the problems that `unread_problems` finds in each phase.

    A key of the run is left out if the optimizer of another phase reads it.
    """
    read = {key for phase in phases if (rule := OPTIMIZERS.get(phase.optim.name)) for key in rule.reads}
    for phase in phases:
        for problem in unread_problems(phase.optim, phase):
            section, key = problem.key.split(".")[:2]
            if section != "optim" or key not in read:
                yield problem


def update_rule_warnings(phases: Sequence[ResolvedPhase]) -> list[str]:
    """Return a sentence for each phase in which a matrix stage gets no weight, or `muon.blocked` has no effect."""
    whole = [
        f"{phase.key('optim.muon')}.blocked=true changes nothing with parallel.tensor=1, which cuts no matrix"
        for phase in phases
        if phase.config.parallel.tensor == 1 and (stage := update_rule(phase.config.optim).matrix_stage) is not None
        if stage.by_shard
    ]
    return whole + [
        f"{phase.key('optim.name')}={phase.optim.name} updates no matrix in phase {phase.settings.name}, which trains "
        f"no projection of a mixer: train projections, or use {phase.own_key('optim.name')}=adamw"
        for phase in phases
        if not _trains_matrices(phase)
    ]


def fresh_state_warnings(phases: Sequence[ResolvedPhase]) -> list[str]:
    """Return a sentence for each phase that changes the optimizer, but continues at the previous learning rate."""
    return [
        f"{phase.own_key('lr_piece')}={phase.settings.lr_piece} begins phase {phase.settings.name} at the previous "
        f"phase's learning rate, but with zero state of {phase.optim.name}: use lr_piece=rewarm, which warms up from 0"
        for phase in phases
        if not phase.keeps_optimizer and phase.settings.lr_piece is not LrPiece.rewarm
    ]


def _trains_matrices(phase: ResolvedPhase) -> bool:
    """Return True if the phase trains a weight for the optimizer's matrix stage, or if there is no such stage."""
    rule = update_rule(phase.config.optim)
    if rule.matrix_stage is None:
        return True
    return any(rule.has_matrix_stage(name, weight) and phase.learns(name) for name, weight in phase.table.items())


def _values(key: str, value: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, default) for `key`, or for each key below it if the value is a section."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _values(f"{key}.{field.name}", getattr(value, field.name), getattr(default, field.name))
    else:
        yield key, value, default
