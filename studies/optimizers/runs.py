"""Training runs of the optimizer study (optimizers.yaml), the choice of learning rates, and the times of steps.

rules.md describes the choice. All runs follow from the stored results, so that a stopped study continues.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.proving.measuring import processor, time_in_turns, versions
from hybridtron.proving.steps import Steps, load_checked, one_process, random_batches
from hybridtron.sweep.grid import SEED, SweepRun
from hybridtron.train.jsonl import read_record, write_whole
from studies.long_text import long_text_losses
from studies.results import Part, Results, commit
from studies.study import Plan, selected

HERE = Path(__file__).parent
RATE = "phases.0.lr"
OPTIMIZERS = ("adamw", "muon")
LADDER = ("3.75e-4", "7.5e-4", "1.5e-3", "3e-3", "6e-3", "1.2e-2", "2.4e-2", "4.8e-2")
TUNED = "1"  # the seed of the choice

Losses = Mapping[str, Mapping[str, float]]
"""A model's losses with the seed of the choice, by optimizer and rate."""


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real study, or for a quick one that takes minutes."""

    settings: tuple[str, ...] = ()
    models: tuple[str, ...] = ("samba", "mamba2", "gdn_hybrid")
    ladder: tuple[str, ...] = LADDER
    first_rates: tuple[str, ...] = LADDER[2:6]
    seeds: tuple[str, ...] = ("2", "3", "4")
    rows: int = 512  # evaluated rows, spread evenly over the held-out text
    rounds: int = 25  # timed steps of each optimizer


STUDY = Sizes()
QUICK = Sizes(
    settings=(
        "phases.0.tokens=${steps:4}",
        "phases.0.seq_len=64",
        "phases.0.global_batch=2",
        "phases.0.micro_batch=2",
        "model.width=32",
        "model.vocab_size=512",
        "model.layers.-.hidden=64",
        "model.layers.W.window=null",  # of a letter that this pattern does not have
        "run.eval_tokens=1K",
    ),
    models=("mamba2",),
    ladder=LADDER[3:6],
    first_rates=LADDER[3:5],
    seeds=("2", "3"),
    rows=4,
    rounds=2,
)


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STUDY


def planned(sizes: Sizes, runs: Path, kept: Path) -> Plan:
    """Return the runs that the results so far ask for.

    rates: each model and optimizer, from the seed of the choice. tokens: further seeds at the chosen rates. time: the
    same for the optimizer with the longer step, with fewer steps.
    """
    results = Results(kept)
    rates: dict[str, tuple[str, ...]] = {}
    chosen: dict[str, tuple[str, ...]] = {}
    fewer_steps: dict[str, int] = {}
    every_rate = part_of(sizes, runs / "rates", dict.fromkeys(variants(sizes), sizes.ladder), (TUNED,))
    for model in sizes.models:
        losses = losses_of(model, every_rate, results)
        tried = rates_to_try(losses, sizes)
        rates |= {f"{model}-{optimizer}": tried[optimizer] for optimizer in OPTIMIZERS}
        if all(losses[optimizer].keys() >= set(tried[optimizer]) for optimizer in OPTIMIZERS):
            chosen |= {f"{model}-{name}": (lowest(losses[name]),) for name in OPTIMIZERS}
            slower, steps = shortened(steps_of(sizes, model), medians_of(times_of(model, kept)))
            fewer_steps[f"{model}-{slower}"] = steps
    at_equal_time = {name: chosen[name] for name in fewer_steps}
    plan = {
        "rates": part_of(sizes, runs / "rates", rates, (TUNED,)),
        "tokens": part_of(sizes, runs / "tokens", chosen, sizes.seeds),
        "time": part_of(sizes, runs / "time", at_equal_time, sizes.seeds, fewer_steps),
    }
    return {name: part for name, part in plan.items() if part.sweep.runs}


def variants(sizes: Sizes) -> list[str]:
    """Return the names of the sweep's variants."""
    return [f"{model}-{optimizer}" for model in sizes.models for optimizer in OPTIMIZERS]


def part_of(
    sizes: Sizes,
    folder: Path,
    rates: Mapping[str, tuple[str, ...]],
    seeds: tuple[str, ...],
    steps: Mapping[str, int] | None = None,
) -> Part:
    """Return a part of the study: the runs of some variants at some rates and seeds.

    `steps` has a variant's number of steps, if it is not that of the sweep.
    """

    def more(run: SweepRun) -> tuple[str, ...] | None:
        if run.values[RATE] not in rates.get(run.variant, ()) or run.values[SEED] not in seeds:
            return None
        if steps is None:
            return sizes.settings
        return (*sizes.settings, f"phases.0.tokens=${{steps:{steps[run.variant]}}}")

    sweep, where = selected(HERE / "optimizers.yaml", folder, more)
    return Part(sweep, where, lambda _, path: held_out_loss(path, sizes.rows), {"rows": sizes.rows})


def losses_of(model: str, part: Part, results: Results) -> dict[str, dict[str, float]]:
    """Return a model's losses in the part `rates`, by optimizer and rate."""
    losses: dict[str, dict[str, float]] = {optimizer: {} for optimizer in OPTIMIZERS}
    for run in part.sweep.runs:
        of_model, _, optimizer = run.variant.rpartition("-")
        result = results.of("rates", part, run)
        if of_model == model and result is not None:
            losses[optimizer][run.values[RATE]] = result.measured
    return losses


def rates_to_try(losses: Losses, sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """Return the rates at which each optimizer is trained, as far as the losses so far determine them.

    Both optimizers always have equally many.
    """
    ladder = sizes.ladder
    tried = dict.fromkeys(OPTIMIZERS, sizes.first_rates)
    while all(losses[name].keys() >= set(tried[name]) for name in OPTIMIZERS):
        inside = [is_inside({rate: losses[name][rate] for rate in tried[name]}) for name in OPTIMIZERS]
        if all(inside) or len(tried[OPTIMIZERS[0]]) == len(ladder):
            break
        tried = {name: with_next(tried[name], losses[name], ladder) for name in OPTIMIZERS}
    return tried


def is_inside(losses: Mapping[str, float]) -> bool:
    """Return True if the rate with the lowest loss is neither the lowest nor the highest rate that was tried."""
    ordered = sorted(losses, key=float)
    return lowest(losses) not in (ordered[0], ordered[-1])


def lowest(losses: Mapping[str, float]) -> str:
    """Return the rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)


def with_next(tried: tuple[str, ...], losses: Mapping[str, float], ladder: tuple[str, ...]) -> tuple[str, ...]:
    """Add the next rate at the end with the lower loss, or at the other end if the ladder has no further rate there."""
    first = ladder.index(tried[0])
    last = ladder.index(tried[-1])
    downwards = losses[tried[0]] < losses[tried[-1]]
    if first > 0 and (downwards or last == len(ladder) - 1):
        return (ladder[first - 1], *tried)
    return (*tried, ladder[last + 1])


def held_out_loss(run: Path, rows: int) -> float:
    """Return the mean loss over held-out rows with the training length."""
    return statistics.mean(long_text_losses(run, 1, rows))


def times_of(model: str, kept: Path) -> dict[str, Any]:
    """Read the stored times of a model's steps; empty if they have not been measured."""
    return read_record(kept / f"speed-{model}.json")


def shortened(steps: int, medians: Mapping[str, float]) -> tuple[str, int]:
    """Return the optimizer with the longer step, and the number of its steps in the time of the other's `steps`."""
    slower = max(OPTIMIZERS, key=medians.__getitem__)
    faster = min(OPTIMIZERS, key=medians.__getitem__)
    return slower, round(steps * medians[faster] / medians[slower])


def medians_of(times: Mapping[str, Any]) -> dict[str, float]:
    """Return the median time of a step, by optimizer."""
    return {optimizer: statistics.median(times["seconds"][optimizer]) for optimizer in OPTIMIZERS}


def steps_of(sizes: Sizes, model: str) -> int:
    """Return the number of steps in a run of the parts `rates` and `tokens`."""
    return RunPlan.of(load(list(settings_of(sizes, model, OPTIMIZERS[0])))).last_step


def settings_of(sizes: Sizes, model: str, optimizer: str) -> tuple[str, ...]:
    """Return the settings of a model with an optimizer, at the first rate."""
    part = part_of(sizes, Path(), {f"{model}-{optimizer}": sizes.first_rates}, (TUNED,))
    return part.sweep.runs[0].settings


def measure_times(sizes: Sizes, kept: Path) -> None:
    """Time the steps of both optimizers in turns, for each model without stored times, and store the times."""
    for model in sizes.models:
        if not times_of(model, kept):
            record = {
                "seconds": timed(sizes, model),
                "commit": commit(),
                "versions": versions(),
                "machine": processor(),
            }
            kept.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
            write_whole(kept / f"speed-{model}.json", f"{{\n{lines}\n}}\n")


def timed(sizes: Sizes, model: str) -> dict[str, tuple[float, ...]]:
    """Return the processor times of a model's steps, by optimizer; the optimizers take turns."""
    configs = {optimizer: load_checked(settings_of(sizes, model, optimizer)) for optimizer in OPTIMIZERS}
    with one_process(configs[OPTIMIZERS[0]]) as groups:
        forms: dict[str, Callable[[], object]] = {
            name: Steps(config, groups, random_batches(config)) for name, config in configs.items()
        }
        return {name: timing.seconds for name, timing in time_in_turns(forms, sizes.rounds).items()}
