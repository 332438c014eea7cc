"""The cost of a training step with each kind of attention, by row length.

Steps are timed in turns, and attention's floating-point operations are counted. Every length has the same number of
tokens a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridtron.architecture.table import architecture
from hybridtron.config.schema import Config
from hybridtron.planning.count import count
from hybridtron.proving.measuring import Timing, time_in_turns
from hybridtron.proving.steps import Steps, load_checked, one_process, random_batches

COSTS = ("full", "SW", "S2", "SE")
YARDSTICK = "SW"
TOKENS = 8192  # tokens of a step, at every length
ROUNDS = 3


@dataclass(frozen=True)
class Cost:
    """The time of a step, and attention's floating-point operations for each token, by our count."""

    timing: Timing
    flops: float


Costs = dict[int, dict[str, Cost]]
"""Costs by length and variant."""


def ratio(of: Mapping[str, Cost], one: str, other: str) -> float:
    """Return the time of a step with one model over that with the other."""
    return of[one].timing.fastest / of[other].timing.fastest


def step_times(settings: Mapping[str, Sequence[str]], lengths: Sequence[int]) -> Costs:
    """Time steps of the given models in turns, at each length, by processor time."""
    costs: Costs = {}
    for length in lengths:
        configs = {name: load_checked(list(at_length(of, length))) for name, of in settings.items()}
        with one_process(next(iter(configs.values()))) as groups:
            forms = {name: Steps(config, groups, random_batches(config)) for name, config in configs.items()}
            timings = time_in_turns(forms, ROUNDS)
        flops = {name: attention_flops(config, length) for name, config in configs.items()}
        costs[length] = {name: Cost(timing, flops[name]) for name, timing in timings.items()}
    return costs


def at_length(settings: Sequence[str], length: int) -> Iterator[str]:
    """Yield a run's settings for rows of another length, with random tokens in place of its data."""
    yield from (text for text in settings if not text.startswith("data"))
    rows = max(1, TOKENS // length)
    yield from (f"phases.0.seq_len={length}", f"phases.0.global_batch={rows}", f"phases.0.micro_batch={rows}")


def attention_flops(config: Config, length: int) -> float:
    """Return attention's forward FLOPs for each token, over all layers: scores, sums and the choice of blocks."""
    layers = count(architecture(config.model), length).layers
    return sum(layer.flops.get(part, 0.0) for layer in layers for part in ("attention", "summaries", "relevance"))
