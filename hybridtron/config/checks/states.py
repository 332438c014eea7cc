"""Rules for `states`: which states can be carried from row to row, and the data order that this needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridtron.architecture.table import architecture
from hybridtron.config.choices import Order, StateKind, StateMode
from hybridtron.config.resolve import NOISE, ResolvedPhase
from hybridtron.problems import Problem


def states_problems(phase: ResolvedPhase) -> Iterator[Problem]:
    """List the problems of a phase's states."""
    states = phase.states
    if states.through_time and (states.mode is not StateMode.tbtt or states.chunks < 2):
        fault = f"is true with mode={states.mode} and chunks={states.chunks}"
        cure = "it joins the chunks of a step: use mode=tbtt with chunks of at least 2, or false"
        yield Problem("states.through_time", "needs-other-key", f"{fault}; {cure}")
    if states.mode is StateMode.zero:
        return
    yield from _order(phase)
    yield from _carried(phase)


def states_warnings(phases: Sequence[ResolvedPhase]) -> list[str]:
    """List mixer options with a surprising effect under the states that are carried, a sentence each."""
    carried = {letter for phase in phases for letter in _letters_of_keys(phase)}
    specs = [pair for phase in phases for pair in architecture(phase.model).by_letter.items()]
    surprises = [(letter, problem) for letter, spec in specs for problem in spec.surprises(letter in carried)]
    return list(
        dict.fromkeys(f"model.layers.{letter}.{surprise.key} {surprise.message}" for letter, surprise in surprises)
    )


def _letters_of_keys(phase: ResolvedPhase) -> set[str]:
    """Return the letters of the sub-layers whose attention keys and values the phase carries, if they have any."""
    states = phase.states
    if states.mode is StateMode.zero or StateKind.kv not in phase.carried_kinds:
        return set()
    letters = architecture(phase.model).letters
    if states.layers is None:
        return set(letters)
    return {letters[layer] for layer in states.layers}


def _order(phase: ResolvedPhase) -> Iterator[Problem]:
    """Check that the data's order and the number of chunks suit the mode."""
    states = phase.states
    settings = phase.settings
    mode_key = phase.key("states.mode")
    order = phase.order
    walking = states.mode is StateMode.tbtt
    if walking and order is not Order.lanes:
        yield Problem(
            "data.order", "conflict", f"is {order}, but {mode_key}=tbtt continues documents: use lanes, or leave it out"
        )
    if states.mode is StateMode.passing and order is Order.lanes:
        yield Problem("data.order", "conflict", f"is lanes, which is what {mode_key}=tbtt is for; passing uses windows")
    if states.chunks < 1 or settings.global_batch % states.chunks:
        yield Problem(
            "states.chunks", "not-divisible", f"is {states.chunks}, must divide global_batch={settings.global_batch}"
        )
    elif states.chunks > 1 and not walking:
        yield Problem("states.chunks", "needs-other-key", f"is {states.chunks}, which belongs to mode=tbtt: use 1")
    elif settings.micro_batch >= 1 and phase.lanes % settings.micro_batch:  # a smaller one is reported by its limit
        lanes = f"global_batch={settings.global_batch} / chunks={states.chunks} = {phase.lanes} lanes"
        yield Problem(
            "states.chunks",
            "not-divisible",
            f"leaves {lanes}, which micro_batch={settings.micro_batch} does not divide",
        )


def _carried(phase: ResolvedPhase) -> Iterator[Problem]:
    """Check that the mode can carry these kinds of states and the chosen sub-layers have them."""
    states = phase.states
    kinds = phase.carried_kinds
    if states.mode in NOISE and kinds != [StateKind.ssm]:
        yield Problem(
            "states.carry", "conflict", f"is {kinds}, but mode={states.mode} draws recurrent states: use [ssm]"
        )
    if states.mode is StateMode.passing and StateKind.kv in kinds:
        yield Problem(
            "states.carry", "conflict", "has kv, but the keys of one text mean nothing to another: leave kv out"
        )
    if (arch := phase.arch) is None:
        return
    if states.layers is None:
        chosen = range(len(arch.specs))
    else:
        chosen = states.layers
    if outside := [layer for layer in chosen if not 0 <= layer < len(arch.specs)]:
        yield Problem(
            "states.layers", "out-of-range", f"names {outside}; the model has sub-layers 0 to {len(arch.specs) - 1}"
        )
        return
    parts = [part for layer in chosen for part in arch.specs[layer].state_parts(arch.sizes).values()]
    if not any(part.kind in kinds for part in parts):
        yield Problem(
            "states.mode", "no-effect", f"is {states.mode}, but no chosen sub-layer has a state of kind {kinds}"
        )
    if any(part.kind in kinds and None in part.shape for part in parts):
        cure = "give it a window, leave it out of layers, or use carry=[ssm, conv]"
        yield Problem("states.carry", "unsupported", f"has kv, and full attention keeps ever more keys: {cure}")
    if StateKind.kv in kinds:
        for letter, spec in {arch.letters[layer]: arch.specs[layer] for layer in chosen}.items():
            for problem in spec.carry_problems(phase.settings.seq_len):
                yield problem.below(f"model.layers.{letter}")
