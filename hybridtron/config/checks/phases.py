"""Rules for `phases`: each phase's batch, data and learning rate, and the allowed changes between phases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from hybridtron.architecture.table import Architecture
from hybridtron.config.choices import LrPiece, Moments, Order, StateMode
from hybridtron.config.lr_shapes import SHAPES
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, PhaseConfig
from hybridtron.config.units import parse_share, parse_tokens, readable
from hybridtron.config.weights import folder_of
from hybridtron.limits import divisors_near, is_folder, shortened
from hybridtron.problems import Problem, choice, did_you_mean


def phase_problems(config: Config, phases: Sequence[ResolvedPhase]) -> Iterator[Problem]:
    """List all problems with the phases."""
    if not phases:
        yield Problem("phases", "missing", "is empty: add at least one phase with tokens, seq_len, global_batch and lr")
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
                f"{where}.name",
                "duplicate",
                f"is {phase.name!r}, which is the name of phases.{earlier}: use another name",
            )
    yield from _durations(phases)


def _sizes(where: str, phase: PhaseConfig) -> Iterator[Problem]:
    if min(phase.seq_len, phase.global_batch, phase.micro_batch) < 1:
        return  # `limit_problems` reports values below 1
    if phase.global_batch % phase.micro_batch:
        fitting = divisors_near(phase.global_batch, phase.micro_batch)
        rule = f"must divide global_batch={phase.global_batch}: use {choice(fitting)}"
        yield Problem(f"{where}.micro_batch", "not-divisible", f"is {phase.micro_batch}, {rule}")
    with suppress(ValueError):  # `limit_problems` reports a text that can't be parsed
        if 0 < parse_tokens(phase.tokens) < phase.tokens_per_step:
            step = f"one step of seq_len={phase.seq_len} x global_batch={phase.global_batch}"
            cure = f"use at least {phase.tokens_per_step}"
            yield Problem(
                f"{where}.tokens", "does-not-fit", f"is {phase.tokens}, less than the tokens of {step}: {cure}"
            )


def _rate(where: str, phase: PhaseConfig, index: int) -> Iterator[Problem]:
    """Report missing and unused learning rates in a phase. `lr_piece` determines which rates the phase needs."""
    piece = phase.lr_piece
    before = f"phases.{index - 1}"
    if piece is not LrPiece.rewarm and index == 0:
        yield Problem(
            f"{where}.lr_piece", "conflict", f"is {piece}, but the first phase has no previous phase: use rewarm"
        )
        return
    if piece is LrPiece.rewarm and phase.lr is None:
        yield Problem(f"{where}.lr", "missing", "must be set to the peak learning rate, such as 4e-4")
    if piece is not LrPiece.rewarm and phase.lr is not None:
        cure = f"leave lr out, so that the rate continues from {before}, or use lr_piece=rewarm"
        yield Problem(f"{where}.lr", "conflict", f"is {phase.lr}, but lr_piece={piece} has no peak rate: {cure}")
    if (piece is LrPiece.decay) != (phase.lr_to is not None):
        if phase.lr_to is None:
            yield Problem(
                f"{where}.lr_to",
                "missing",
                "must be set for lr_piece=decay, to the rate at the phase's end, such as 1e-5",
            )
        else:
            yield Problem(
                f"{where}.lr_to",
                "no-effect",
                f"is {phase.lr_to}, which has no effect with lr_piece={piece}: leave lr_to out, or use lr_piece=decay",
            )
    if piece is LrPiece.carry_on:
        for name in ("schedule", "hold", "warmup", "decay", "final_lr"):
            if getattr(phase.optim, name) is not None:
                why = f"but lr_piece=carry_on continues the schedule of {before}"
                yield Problem(
                    f"{where}.optim.{name}", "no-effect", f"is {getattr(phase.optim, name)}, {why}: leave {name} out"
                )


def _ramp(where: str, resolved: ResolvedPhase) -> Iterator[Problem]:
    """Report a ramp that does not fit the phase.

    A ramp must reach `global_batch` in equal increments, have full micro-batches, and end before the phase. It also
    needs `states.mode=zero` and `data.order=windows`. In other modes and orders, each row continues the state or the
    document of the previous row in its lane, and lanes that are added by a growing batch would have no previous row.
    """
    phase = resolved.settings
    ramp = resolved.settings.ramp
    if ramp is None or min(ramp.start, ramp.step) < 1:
        return
    if ramp.start >= phase.global_batch or (phase.global_batch - ramp.start) % ramp.step:
        needed = f"must divide global_batch - ramp.start = {phase.global_batch} - {ramp.start}"
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
    with suppress(ValueError):  # `limit_problems` reports texts that can't be parsed
        if parse_tokens(ramp.tokens) >= parse_tokens(phase.tokens):
            yield Problem(
                f"{where}.ramp.tokens",
                "out-of-range",
                f"is {ramp.tokens}, must be less than the phase's tokens={phase.tokens}",
            )
    if resolved.states.mode is not StateMode.zero or resolved.order is not Order.windows:
        cure = "leave ramp out, or use states.mode=zero and data.order=windows"
        yield Problem(
            f"{where}.ramp", "conflict", f"is set, but a batch can't grow if rows continue previous rows: {cure}"
        )


def _start(where: str, phase: PhaseConfig, index: int) -> Iterator[Problem]:
    """Report `init_from` or `moments` if they are invalid for the phase."""
    if index == 0 and phase.init_from is not None:
        yield Problem(f"{where}.init_from", "misplaced", "has no effect in the first phase: set run.weights instead")
    elif phase.init_from is not None and not is_folder(folder_of(phase.init_from)):
        cure = "name a run's folder or one of its checkpoints"
        yield Problem(
            f"{where}.init_from", "no-file", f"is {shortened(phase.init_from)!r}, which is not a folder: {cure}"
        )
    if phase.moments is Moments.reset and index == 0:
        yield Problem(
            f"{where}.moments", "no-effect", "is reset, but the first phase has no moments to reset: leave moments out"
        )


def _layers(where: str, config: Config, phase: ResolvedPhase) -> Iterator[Problem]:
    """Report unknown letters in `layers`, and changes that would add, remove or reshape weights.

    Options such as windows may differ, since they change only how weights are used.
    """
    unknown = [letter for letter in phase.settings.layers if letter not in config.model.layers]
    for letter in unknown:
        letters = list(config.model.layers)
        message = f"changes {letter}, which is not in model.layers{did_you_mean(letter, letters)}"
        yield Problem(f"{where}.layers.{letter}", "unknown-name", f"{message}; model.layers has {', '.join(letters)}")
    if unknown or phase.before is None or phase.before.parsed is None or phase.parsed is None:
        return
    old = _weights(phase.before.parsed)
    new = _weights(phase.parsed)
    if changed := [name for name in {**old, **new} if old.get(name) != new.get(name)]:
        cure = "change only options that keep all weights, such as windows and RoPE bases"
        yield Problem(
            f"{where}.layers", "changed", f"changes the weight {changed[0]} of phases.{phase.before.index}: {cure}"
        )


def _path(phase: ResolvedPhase) -> Iterator[Problem]:
    """Report a phase's `data.path` if every source in the mixture has its own path, so that `data.path` is not read."""
    path = phase.settings.data.path
    mixture = phase.data.mixture
    if path is None or not mixture or any(entry.path is None for entry in mixture.values()):
        return
    sources = ", ".join(f"{name} of {entry.path}" for name, entry in mixture.items())
    whose = "phase's" if phase.settings.data.mixture else "run's"
    cure = "to read only this folder, also set mixture: null; to add it, make it a source of the mixture"
    key = phase.own_key("data.path")
    yield Problem(
        key, "no-effect", f"is {shortened(path)!r}, which the {whose} mixture does not read ({sources}): {cure}"
    )


def _weights(arch: Architecture) -> dict[str, tuple[object, object]]:
    """Return name -> (shape, parts) for every weight except adapters, which phases may add and remove."""
    return {name: (weight.shape, weight.parts) for name, weight in arch.base_table.items()}


def _trained(where: str, phase: ResolvedPhase) -> Iterator[Problem]:
    """Report an empty `train`, and patterns in `train` that match no weight with a gradient."""
    if (patterns := phase.settings.train) is None:
        return
    if not patterns:
        yield Problem(
            f"{where}.train",
            "missing",
            "is empty: name weights such as layers.*.mixer.*, or leave train out to train all weights",
        )
    if phase.parsed is None:
        return
    table = phase.parsed.table
    names = [name for name, weight in table.items() if weight.trained]
    for pattern in patterns:
        matches = [name for name in table if fnmatchcase(name, pattern)]
        if matches and not any(table[name].trained for name in matches):
            what = f"has {pattern!r}, which matches only weights without a gradient, such as {matches[0]}"
            cure = f"leave it out, and name weights that learn, such as {names[0]}"
            yield Problem(f"{where}.train", "no-effect", f"{what}: {cure}")
        if not matches:
            cure = f"{did_you_mean(pattern, names)}; names of weights are {names[0]}, {names[1]} and so on"
            yield Problem(f"{where}.train", "unknown-name", f"has {pattern!r}, which matches no weight{cure}")


def _durations(phases: Sequence[ResolvedPhase]) -> Iterator[Problem]:
    """Report hold, warm-up and decay lengths that do not fit into a learning-rate schedule.

    Also report a shape without a decay in a phase with `lr_piece=decay`.
    """
    for phase in phases:
        optim = phase.optim
        shape = SHAPES.get(phase.optim.schedule)
        if shape is None:
            continue  # `limit_problems` reports an unknown schedule
        if phase.settings.lr_piece is LrPiece.decay and not shape.falls:
            fitting = ", ".join(name for name, candidate in SHAPES.items() if candidate.falls)
            key = phase.key("optim.schedule")
            yield Problem(
                key, "conflict", f"is {optim.schedule}, which never reaches the lr_to of lr_piece=decay: use {fitting}"
            )
        if phase.settings.lr_piece is not LrPiece.rewarm:
            continue
        lengths = {"warmup": optim.warmup, "hold": optim.hold} | ({"decay": optim.decay} if shape.uses_decay else {})
        try:
            whole = _tokens_of_course(phases[phase.index :])
            needed = sum(parse_share(text, whole) for text in lengths.values())
        except ValueError:
            continue  # `limit_problems` reports texts that can't be parsed
        if needed > whole:
            other_keys = [phase.key(f"optim.{name}") for name in ("hold", "decay") if lengths.get(name, "0") != "0"]
            if other_keys:
                with_others = f" together with {' and '.join(other_keys)}"
            else:
                with_others = ""
            yield Problem(
                phase.key("optim.warmup"),
                "does-not-fit",
                f"takes {readable(needed)} tokens{with_others}, more than the schedule of phases.{phase.index} has: "
                f"use at most {readable(whole)}, or a share such as 1%",
            )


def _tokens_of_course(phases: Sequence[ResolvedPhase]) -> int:
    """Return the token count of the learning-rate schedule that starts with the first phase in `phases`.

    The schedule covers this phase and the `lr_piece=carry_on` phases directly after it. Raises ValueError if a token
    count can't be parsed.
    """
    leader, *others = (phase.settings for phase in phases)
    followers = itertools.takewhile(lambda settings: settings.lr_piece is LrPiece.carry_on, others)
    return sum(parse_tokens(phase.tokens) for phase in (leader, *followers))
