"""The rules of `states`: what can be carried from row to row, and what the data must be for it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridtron.architecture.table import architecture
from hybridtron.config.schema import Config, Order, PhaseConfig, StateKind, StateMode, StatesConfig
from hybridtron.problems import ConfigError, Problem

NOISE = (StateMode.random, StateMode.fitted)


def states_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the states of each phase."""
    for index, phase in enumerate(config.phases):
        states = config.states_of(phase)
        where = f"phases.{index}.states" if phase.states.mode is not None else "states"
        if states.through_time and (states.mode is not StateMode.tbtt or states.chunks < 2):
            found = f"is true with mode={states.mode} and chunks={states.chunks}"
            cure = "it joins the chunks of a step: use mode=tbtt with chunks of at least 2, or false"
            yield Problem(f"{where}.through_time", f"{found}; {cure}")
        if states.mode is StateMode.zero:
            continue
        yield from _numbers(where, states)
        yield from _order(where, config, phase, states)
        yield from _carried(where, config, phase, states)


def carried_kinds(states: StatesConfig) -> list[StateKind]:
    """What is carried: as set, or what the mode is about."""
    if states.carry is not None:
        return states.carry
    return list(StateKind) if states.mode is StateMode.tbtt else [StateKind.ssm]


def states_warnings(config: Config) -> list[str]:
    """What options of mixers do otherwise than it looks, with the states that are carried."""
    carried = {letter for phase in config.phases for letter in _letters_of_keys(config, phase)}
    archs = [architecture(config.in_phase(phase).model) for phase in config.phases]
    specs = [pair for arch in archs for pair in dict(zip(arch.letters, arch.specs, strict=True)).items()]
    found = [(letter, problem) for letter, spec in specs for problem in spec.surprises(letter in carried)]
    return list(dict.fromkeys(f"model.layers.{letter}.{one.key} {one.message}" for letter, one in found))


def _letters_of_keys(config: Config, phase: PhaseConfig) -> set[str]:
    """Those of the sub-layers whose keys and values the phase carries, if they have any."""
    states = config.states_of(phase)
    if states.mode is StateMode.zero or StateKind.kv not in carried_kinds(states):
        return set()
    letters = architecture(config.in_phase(phase).model).letters
    return set(letters) if states.layers is None else {letters[layer] for layer in states.layers}


def _numbers(where: str, states: StatesConfig) -> Iterator[Problem]:
    if not 0 <= states.sigma < math.inf:
        yield Problem(f"{where}.sigma", f"is {states.sigma}, must be at least 0")
    for name in ("beta", "dropout"):
        if not 0 <= (value := getattr(states, name)) < 1:
            yield Problem(f"{where}.{name}", f"is {value}, must be at least 0 and below 1, such as 0.1")


def _order(where: str, config: Config, phase: PhaseConfig, states: StatesConfig) -> Iterator[Problem]:
    order, walking = config.order_of(phase), states.mode is StateMode.tbtt
    if walking and order is not Order.lanes:
        yield Problem("data.order", f"is {order}, but {where}.mode=tbtt reads on: use lanes, or leave it out")
    if states.mode is StateMode.passing and order is Order.lanes:
        yield Problem("data.order", f"is lanes, which is what {where}.mode=tbtt is for; passing uses windows")
    if states.chunks < 1 or phase.global_batch % states.chunks:
        yield Problem(f"{where}.chunks", f"is {states.chunks}, must divide global_batch={phase.global_batch}")
    elif states.chunks > 1 and not walking:
        yield Problem(f"{where}.chunks", f"is {states.chunks}, which belongs to mode=tbtt: use 1")
    elif config.lanes_of(phase) % phase.micro_batch:
        lanes = f"global_batch={phase.global_batch} / chunks={states.chunks} = {config.lanes_of(phase)} lanes"
        yield Problem(f"{where}.chunks", f"leaves {lanes}, which micro_batch={phase.micro_batch} does not divide")


def _carried(where: str, config: Config, phase: PhaseConfig, states: StatesConfig) -> Iterator[Problem]:
    kinds = carried_kinds(states)
    if states.mode in NOISE and kinds != [StateKind.ssm]:
        yield Problem(f"{where}.carry", f"is {kinds}, but mode={states.mode} draws recurrent states: use [ssm]")
    if states.mode is StateMode.passing and StateKind.kv in kinds:
        yield Problem(f"{where}.carry", "has kv, but the keys of one text mean nothing to another: leave kv out")
    try:
        arch = architecture(config.model)
    except (ConfigError, ValueError):
        return  # told by the model's own rules
    chosen = range(len(arch.specs)) if states.layers is None else states.layers
    if wrong := [layer for layer in chosen if not 0 <= layer < len(arch.specs)]:
        yield Problem(f"{where}.layers", f"names {wrong}; the model has sub-layers 0 to {len(arch.specs) - 1}")
        return
    parts = [part for layer in chosen for part in arch.specs[layer].state_parts(arch.sizes).values()]
    if not any(part.kind in kinds for part in parts):
        yield Problem(f"{where}.mode", f"is {states.mode}, but no chosen sub-layer has a state of kind {kinds}")
    if any(part.kind in kinds and None in part.shape for part in parts):
        cure = "give it a window, leave it out of layers, or use carry=[ssm, conv]"
        yield Problem(f"{where}.carry", f"has kv, and full attention keeps ever more keys: {cure}")
    if StateKind.kv in kinds:
        for letter, spec in {arch.letters[layer]: arch.specs[layer] for layer in chosen}.items():
            for problem in spec.carry_problems(phase.seq_len):
                yield Problem(f"model.layers.{letter}.{problem.key}", problem.message)
