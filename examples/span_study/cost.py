"""What a training step costs with each kind of attention, over the length of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridtron.config.schema import Config
from hybridtron.planning.count import count
from hybridtron.proving.measuring import Timing, interleaved
from hybridtron.proving.steps import Steps, checked, one_process, random_batches

COSTS = ("full", "SW", "S2", "SE")
YARDSTICK = "SW"
TOKENS = 8192  # of a step at every length
ROUNDS = 3


@dataclass(frozen=True)
class Cost:
    """Of a step at a length: its time, and attention's floating-point operations a token, by our count."""

    timing: Timing
    flops: float


Costs = dict[int, dict[str, Cost]]
"""By length and variant."""


def ratio(of: Mapping[str, Cost], one: str, other: str) -> float:
    """How much longer a step takes."""
    return of[one].timing.fastest / of[other].timing.fastest


def step_times(settings: Mapping[str, Sequence[str]], lengths: Sequence[int]) -> Costs:
    """Steps of the models of these settings in turns, by processor time."""
    found: Costs = {}
    for length in lengths:
        configs = {name: checked(list(at_length(of, length))) for name, of in settings.items()}
        with one_process(next(iter(configs.values()))) as groups:
            forms = {name: Steps(config, groups, random_batches(config)) for name, config in configs.items()}
            timings = interleaved(forms, ROUNDS)
        flops = {name: attention_flops(config, length) for name, config in configs.items()}
        found[length] = {name: Cost(timing, flops[name]) for name, timing in timings.items()}
    return found


def at_length(settings: Sequence[str], length: int) -> Iterator[str]:
    """The settings of a run with rows of another length, of random tokens."""
    yield from (text for text in settings if not text.startswith("data"))
    rows = max(1, TOKENS // length)
    yield from (f"phases.0.seq_len={length}", f"phases.0.global_batch={rows}", f"phases.0.micro_batch={rows}")


def attention_flops(config: Config, length: int) -> float:
    """Forward, per token, of scores, sums and the choice of blocks, in all layers together."""
    layers = count(config.model, length).layers
    return sum(layer.flops.get(part, 0.0) for layer in layers for part in ("attention", "summaries", "relevance"))
