"""Rules for `phases`: each one's data and learning rate, and the changes allowed from one to the next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import parameter_table
from hybridtron.config.choices import LrPiece, Moments, Order, StateMode
from hybridtron.config.lr_shapes import SHAPES
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, PhaseConfig
from hybridtron.config.units import parse_share, parse_tokens, readable
from hybridtron.config.weights import folder_of
from hybridtron.limits import divisors_near, is_folder, shortened
from hybridtron.problems import Problem, choice, did_you_mean


def phase_problems(config: Config, phases: Sequence[ResolvedPhase]) -> Iterator[Problem]:
    """List all problems of the phases and their order."""
    if not phases:
        yield Problem(
            "phases", "missing", "is empty: a run needs at least one phase with tokens, seq_len, global_batch and lr"
        )
    first_named: dict[str, int] = {}
    for index, phase in enumerate(config.phases):
        where = f"phases.{index}"
        yield from _sizes(where, phase)
        yield from _rate(where, phase, index)
        yield from _ramp(where, phases[index])
        yield from _start(where, phase, index)
        yield from _layers(where, config, phases[index])
        yield from _path(phases[index])
        yield from _trained(where, phases[index])
        earlier = first_named.setdefault(phase.name, index)
        if earlier != index:
            yield Problem(
                f"{where}.name", "duplicate", f"is {phase.name!r}, as is that of phases.{earlier}: give it another"
            )
    yield from _durations(phases)


def _sizes(where: str, phase: PhaseConfig) -> Iterator[Problem]:
    if min(phase.seq_len, phase.global_batch, phase.micro_batch) < 1:
        return  # reported by their limits
    if phase.global_batch % phase.micro_batch:
        fitting = divisors_near(phase.global_batch, phase.micro_batch)
        rule = f"must divide global_batch={phase.global_batch}: {choice(fitting)}"
        yield Problem(f"{where}.micro_batch", "not-divisible", f"is {phase.micro_batch}, {rule}")
    with suppress(ValueError):  # reported by its limit
        if 0 < parse_tokens(phase.tokens) < phase.tokens_per_step:
            step = f"one step of seq_len={phase.seq_len} x global_batch={phase.global_batch}"
            cure = f"use at least {phase.tokens_per_step}"
            yield Problem(f"{where}.tokens", "does-not-fit", f"is {phase.tokens}, less than {step}: {cure}")


def _rate(where: str, phase: PhaseConfig, index: int) -> Iterator[Problem]:
    """Check that each part of the learning-rate schedule has the numbers it needs and no others."""
    piece = phase.lr_piece
    before = f"phases.{index - 1}"
    if piece is not LrPiece.rewarm and index == 0:
        yield Problem(f"{where}.lr_piece", "conflict", f"is {piece}, but there is no phase before: use rewarm")
        return
    if piece is LrPiece.rewarm and phase.lr is None:
        yield Problem(f"{where}.lr", "missing", "must be set: the peak of the learning rate, such as 4e-4")
    if piece is not LrPiece.rewarm and phase.lr is not None:
        cure = f"leave lr out, as it continues from {before}, or use lr_piece=rewarm"
        yield Problem(f"{where}.lr", "conflict", f"is {phase.lr}, but lr_piece={piece} has no peak of its own: {cure}")
    if (piece is LrPiece.decay) != (phase.lr_to is not None):
        if phase.lr_to is None:
            yield Problem(
                f"{where}.lr_to", "missing", "must be set for lr_piece=decay: the rate at the phase's end, such as 1e-5"
            )
        else:
            yield Problem(
                f"{where}.lr_to", "no-effect", f"is {phase.lr_to}, which belongs to lr_piece=decay, not {piece}"
            )
    if piece is LrPiece.carry_on:
        for name in ("schedule", "hold", "warmup", "decay", "final_lr"):
            if getattr(phase.optim, name) is not None:
                why = f"but lr_piece=carry_on follows the course of {before}"
                yield Problem(
                    f"{where}.optim.{name}", "no-effect", f"is {getattr(phase.optim, name)}, {why}: leave it out"
                )


def _ramp(where: str, resolved: ResolvedPhase) -> Iterator[Problem]:
    """Check that the batch grows in equal steps to its full size, and only while no lanes are carried.

    A lane that joined later would have no state to continue from.
    """
    phase = resolved.settings
    ramp = resolved.settings.ramp
    if ramp is None or min(ramp.start, ramp.step) < 1:
        return
    if ramp.start >= phase.global_batch or (phase.global_batch - ramp.start) % ramp.step:
        needed = f"must reach global_batch={phase.global_batch} from {ramp.start} in whole steps"
        fitting = divisors_near(max(phase.global_batch - ramp.start, 1), ramp.step)
        if ramp.start < phase.global_batch and fitting:
            cure = f"use step={choice(fitting)}"
        else:
            cure = "use a smaller start"
        yield Problem(f"{where}.ramp.step", "not-divisible", f"is {ramp.step}, {needed}: {cure}")
    for name in ("start", "step"):
        if phase.micro_batch > 0 and (size := getattr(ramp, name)) % phase.micro_batch:
            yield Problem(
                f"{where}.ramp.{name}",
                "not-divisible",
                f"is {size}, must be a multiple of micro_batch={phase.micro_batch}",
            )
    with suppress(ValueError):  # reported by their limits
        if parse_tokens(ramp.tokens) >= parse_tokens(phase.tokens):
            yield Problem(
                f"{where}.ramp.tokens",
                "out-of-range",
                f"is {ramp.tokens}, must be less than the phase's {phase.tokens}",
            )
    if resolved.states.mode is not StateMode.zero or resolved.order is not Order.windows:
        cure = "leave it out, or use states.mode=zero and data.order=windows"
        yield Problem(
            f"{where}.ramp", "conflict", f"is set, but a batch can grow only where no lane is carried on: {cure}"
        )


def _start(where: str, phase: PhaseConfig, index: int) -> Iterator[Problem]:
    """Check that the phase's initial weights exist."""
    if index == 0 and phase.init_from is not None:
        yield Problem(f"{where}.init_from", "misplaced", "is the first phase's: name those weights as run.weights")
    elif phase.init_from is not None and not is_folder(folder_of(phase.init_from)):
        cure = "name a run's folder or one of its checkpoints"
        yield Problem(
            f"{where}.init_from", "no-file", f"is {shortened(phase.init_from)!r}, which is not a folder: {cure}"
        )
    if phase.moments is Moments.reset and index == 0:
        yield Problem(f"{where}.moments", "no-effect", "is reset, but the first phase has none yet: leave it out")


def _layers(where: str, config: Config, phase: ResolvedPhase) -> Iterator[Problem]:
    """Check that a phase keeps the names and shapes of all weights.

    A phase may use the previous phase's weights in another way, but it cannot add, remove or reshape any.
    """
    unknown = [letter for letter in phase.settings.layers if letter not in config.model.layers]
    for letter in unknown:
        known = list(config.model.layers)
        message = f"changes a letter that model.layers does not define{did_you_mean(letter, known)}"
        yield Problem(f"{where}.layers.{letter}", "unknown-name", f"{message}; it has {', '.join(known)}")
    if unknown or phase.before is None or phase.before.arch is None or phase.arch is None:
        return
    before = _weights(phase.before.model)
    after = _weights(phase.model)
    if changed := [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        cure = "a phase may change windows, RoPE bases and what else leaves the weights as they are"
        yield Problem(
            f"{where}.layers", "changed", f"changes the weight {changed[0]} of phases.{phase.before.index}: {cure}"
        )


def _path(phase: ResolvedPhase) -> Iterator[Problem]:
    """Report a phase's folder that is not read, since every source of its mixture has a folder of its own."""
    path = phase.settings.data.path
    mixture = phase.data.mixture
    if path is None or not mixture or any(entry.path is None for entry in mixture.values()):
        return
    others = ", ".join(f"{name} of {entry.path}" for name, entry in mixture.items())
    whose = "phase's" if phase.settings.data.mixture else "run's"
    cure = "to read that folder alone write mixture: null beside it, to read it too make it a source of the mixture"
    key = phase.own_key("data.path")
    yield Problem(
        key, "no-effect", f"is {shortened(path)!r}, which the {whose} mixture does not read ({others}): {cure}"
    )


def _weights(model: ModelConfig) -> dict[str, tuple[object, object]]:
    """Return shape and parts of every weight by name, without adapters, which may come and go."""
    table = parameter_table(replace(model, adapters=None))
    return {name: (weight.shape, weight.parts) for name, weight in table.items()}


def _trained(where: str, phase: ResolvedPhase) -> Iterator[Problem]:
    """Check that every pattern in `train` matches at least one weight."""
    if (patterns := phase.settings.train) is None:
        return
    if not patterns:
        yield Problem(
            f"{where}.train", "missing", "is empty: name weights such as layers.*.mixer.*, or leave it out for all"
        )
    if phase.arch is None:
        return
    names = list(parameter_table(phase.model))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            cure = f"{did_you_mean(pattern, names)}; weights are called {names[0]}, {names[1]} and so on"
            yield Problem(f"{where}.train", "unknown-name", f"has {pattern!r}, which matches no weight{cure}")


def _durations(phases: Sequence[ResolvedPhase]) -> Iterator[Problem]:
    """Check that hold, warm-up and decay fit into each learning-rate schedule."""
    for phase in phases:
        optim = phase.optim
        shape = SHAPES.get(phase.optim.schedule)
        if shape is None:
            continue  # reported by the rules of `optim`
        if phase.settings.lr_piece is LrPiece.decay and not shape.falls:
            fitting = ", ".join(name for name, candidate in SHAPES.items() if candidate.falls)
            key = phase.key("optim.schedule")
            yield Problem(
                key, "conflict", f"is {optim.schedule}, which lr_piece=decay can't follow to lr_to: use {fitting}"
            )
        if phase.settings.lr_piece is not LrPiece.rewarm:
            continue
        lengths = {"warmup": optim.warmup, "hold": optim.hold} | ({"decay": optim.decay} if shape.uses_decay else {})
        try:
            whole = _tokens_of_course(phases[phase.index :])
            needed = sum(parse_share(text, whole) for text in lengths.values())
        except ValueError:
            continue  # reported by their limits
        if needed > whole:
            others = [phase.key(f"optim.{name}") for name in ("hold", "decay") if lengths.get(name, "0") != "0"]
            if others:
                both = f" together with {' and '.join(others)}"
            else:
                both = ""
            yield Problem(
                phase.key("optim.warmup"),
                "does-not-fit",
                f"takes {readable(needed)} tokens{both}, more than phases.{phase.index} has: "
                f"use at most {readable(whole)}, or a share such as 1%",
            )


def _tokens_of_course(phases: Sequence[ResolvedPhase]) -> int:
    """Return the length in tokens for the learning-rate schedule that starts with the first of these phases.

    The phases after it count while they have lr_piece=carry_on. Raises ValueError if a length cannot be parsed.
    """
    leader, *others = (phase.settings for phase in phases)
    followers = itertools.takewhile(lambda settings: settings.lr_piece is LrPiece.carry_on, others)
    return sum(parse_tokens(phase.tokens) for phase in (leader, *followers))
