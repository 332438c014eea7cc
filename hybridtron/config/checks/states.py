"""Rules for `states`, the initial states of rows.

The rules limit the state kinds, sub-layers, chunks and data order. A lane is one row position in the batch over all
steps. With `states.mode=passing` or `tbtt` the state is carried: a row starts from the final state of the previous row
in its lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridtron.config.choices import Order, StateKind, StateMode
from hybridtron.config.resolve import NOISE, ResolvedPhase
from hybridtron.problems import Problem


def states_problems(phase: ResolvedPhase) -> Iterator[Problem]:
    """List the problems with a phase's states."""
    states = phase.states
    if states.through_time and (states.mode is not StateMode.tbtt or states.chunks < 2):
        fault = f"is true with states.mode={states.mode} and states.chunks={states.chunks}"
        cure = "but needs states.mode=tbtt and states.chunks of at least 2: set both keys, or use false"
        yield Problem("states.through_time", "needs-other-key", f"{fault}, {cure}")
    if states.mode is StateMode.zero:
        return
    yield from _order(phase)
    yield from _carried(phase)


def states_warnings(phases: Sequence[ResolvedPhase]) -> list[str]:
    """Return a sentence for each sub-layer option with a surprising effect.

    Some options have such an effect only if attention's keys and values are carried.
    """
    carried = {letter for phase in phases for letter in _letters_of_keys(phase)}
    specs = [pair for phase in phases for pair in phase.arch.by_letter.items()]
    warnings = [(letter, problem) for letter, spec in specs for problem in spec.warnings(letter in carried)]
    return list(dict.fromkeys(f"model.layers.{letter}.{warning.key} {warning.message}" for letter, warning in warnings))


def _letters_of_keys(phase: ResolvedPhase) -> set[str]:
    """Return the letters of the sub-layers whose keys and values the phase carries.

    A letter is a key in `model.layers`. Letters of sub-layers without keys and values may be included.
    """
    states = phase.states
    if states.mode is StateMode.zero or StateKind.kv not in phase.carried_kinds:
        return set()
    letters = phase.arch.letters
    if states.layers is None:
        return set(letters)
    return {letters[layer] for layer in states.layers}


def _order(phase: ResolvedPhase) -> Iterator[Problem]:
    """Report a data order or a chunk count that does not fit `states.mode`."""
    states = phase.states
    settings = phase.settings
    mode_key = phase.key("states.mode")
    order = phase.order
    is_tbtt = states.mode is StateMode.tbtt
    if is_tbtt and order is not Order.lanes:
        yield Problem(
            "data.order",
            "conflict",
            f"is {order}, but {mode_key}=tbtt continues documents: use lanes, or leave data.order out",
        )
    if states.mode is StateMode.passing and order is Order.lanes:
        yield Problem(
            "data.order", "conflict", f"is lanes, but {mode_key}=passing needs windows: use windows, or {mode_key}=tbtt"
        )
    if states.chunks < 1 or settings.global_batch % states.chunks:
        yield Problem(
            "states.chunks", "not-divisible", f"is {states.chunks}, must divide global_batch={settings.global_batch}"
        )
    elif states.chunks > 1 and not is_tbtt:
        yield Problem(
            "states.chunks",
            "needs-other-key",
            f"is {states.chunks}, which needs states.mode=tbtt: use 1, or states.mode=tbtt",
        )
    elif settings.micro_batch >= 1 and phase.lanes % settings.micro_batch:  # `limit_problems` reports micro_batch < 1
        lanes = f"global_batch={settings.global_batch} / chunks={states.chunks} = {phase.lanes} lanes"
        yield Problem(
            "states.chunks",
            "not-divisible",
            f"gives {lanes}, but micro_batch={settings.micro_batch} must divide the number of lanes",
        )


def _carried(phase: ResolvedPhase) -> Iterator[Problem]:
    """Report state kinds that the mode can't carry, and sub-layers without such a state."""
    states = phase.states
    kinds = phase.carried_kinds
    if states.mode in NOISE and kinds != [StateKind.ssm]:
        yield Problem(
            "states.carry",
            "conflict",
            f"is {kinds}, but states.mode={states.mode} draws only recurrent states: use [ssm]",
        )
    if states.mode is StateMode.passing and StateKind.kv in kinds:
        yield Problem(
            "states.carry",
            "conflict",
            "has kv, but with states.mode=passing the previous row is another text: leave kv out",
        )
    if (arch := phase.parsed) is None:
        return
    if states.layers is None:
        chosen = range(len(arch.specs))
    else:
        chosen = states.layers
    if outside := [layer for layer in chosen if not 0 <= layer < len(arch.specs)]:
        yield Problem(
            "states.layers",
            "out-of-range",
            f"has {outside}, but the model has sub-layers 0 to {len(arch.specs) - 1}: use these indices",
        )
        return
    parts = [part for layer in chosen for part in arch.specs[layer].state_parts(arch.sizes).values()]
    if not any(part.kind in kinds for part in parts):
        yield Problem(
            "states.mode", "no-effect", f"is {states.mode}, but no chosen sub-layer has a state of kind {kinds}"
        )
    if any(part.kind in kinds and None in part.shape for part in parts):
        cure = "give the attention a window, leave it out of states.layers, or use states.carry=[ssm, conv]"
        yield Problem(
            "states.carry", "unsupported", f"has kv, but the keys of full attention grow with every row: {cure}"
        )
    if StateKind.kv in kinds:
        for letter, spec in {arch.letters[layer]: arch.specs[layer] for layer in chosen}.items():
            for problem in spec.carry_problems(phase.settings.seq_len):
                yield problem.below(f"model.layers.{letter}")
