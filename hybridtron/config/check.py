"""Every rule that a configuration must keep and its types can't say.

Each function looks at one section and lists what is wrong there, with the value that would work; `check` tells all
of it at once, before torch is imported or a process group exists. The rules of `parallel`, which reach into all other
sections, stand in `check_parallel.py`, those of `data`, `states` and `precision` in `check_data.py`,
`check_states.py` and `check_precision.py`. What can be said of the data itself (that
it can be read, that its vocabulary fits) stands in `data/ingredients.py`.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hybridtron.config.architecture import letter_specs
from hybridtron.config.check_data import data_problems
from hybridtron.config.check_parallel import parallel_problems
from hybridtron.config.check_precision import precision_problems, precision_warnings
from hybridtron.config.check_states import states_problems
from hybridtron.config.layout import chunk_count
from hybridtron.config.pattern import RESERVED, PatternError, parse
from hybridtron.config.problems import ConfigError, choice
from hybridtron.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    OptimConfig,
    PhaseConfig,
    RunConfig,
    Schedule,
)
from hybridtron.config.units import FORMS, parse_share, parse_steps, parse_tokens, readable
from hybridtron.specs.base import ModelSizes, Problem


def check(config: Config, world_size: int | None = None) -> list[Problem]:
    """All that is wrong with the configuration; empty where it can run on so many processes (None: on the fewest)."""
    found = [
        *_model(config),
        *_phases(config.phases),
        *data_problems(config),
        *states_problems(config),
        *_optim(config.optim),
        *_durations(config.optim, config.phases),
        *_run(config.run),
        *_validation(config.run, config.phases),
        *_checkpoint(config.checkpoint),
        *parallel_problems(config, world_size),
        *precision_problems(config),
        *_cluster(config.cluster),
    ]
    return list(dict.fromkeys(found))


def require(config: Config, world_size: int | None = None) -> None:
    """Raise ConfigError with everything that is wrong, if anything is."""
    if found := check(config, world_size):
        raise ConfigError(found)


def warnings(config: Config) -> list[str]:
    """What is set and has no effect, one sentence each; for a configuration that `check` finds nothing wrong with."""
    pattern = parse(config.model.pattern, config.model.layers)
    found = [
        f"model.layers.{letter} is defined, but model.pattern does not use it"
        for letter in config.model.layers
        if letter not in pattern.letters
    ]
    if config.parallel.sequence and config.parallel.tensor == 1:
        found.append("parallel.sequence=true has no effect: it belongs to parallel.tensor of at least 2")
    if len(pattern.stages) > 1 and chunk_count(config.parallel) == 1:
        found.append("model.pattern has stage borders, which parallel.pipeline=1 does not use")
    if config.optim.schedule != Schedule.wsd and config.optim.decay != OptimConfig.decay:
        found.append(f"optim.decay={config.optim.decay} has no effect: it belongs to optim.schedule=wsd")
    return [*found, *precision_warnings(config.precision)]


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    yield from _at_least(1, {"model.width": model.width, "model.vocab_size": model.vocab_size})
    yield from _above_zero({"model.norm_eps": model.norm_eps, "model.embedding_std": model.embedding_std})
    for letter in model.layers:
        if len(letter) != 1 or letter.isspace() or letter in RESERVED:
            yield Problem(
                f"model.layers.{letter}", f"is no letter: use one character, not a space or one of {RESERVED}"
            )
    specs, found = letter_specs(model)
    yield from found
    num_sublayers = 1
    try:
        num_sublayers = len(parse(model.pattern, model.layers).letters)
    except PatternError as error:
        yield Problem("model.pattern", str(error))
    if model.width < 1:
        return
    longest = max((phase.seq_len for phase in config.phases if phase.seq_len > 0), default=sys.maxsize)
    for letter, spec in specs.items():
        for problem in spec.problems(ModelSizes(model.width, num_sublayers), longest):
            yield Problem(f"model.layers.{letter}.{problem.key}", problem.message)


def _phases(phases: list[PhaseConfig]) -> Iterator[Problem]:
    if not phases:
        yield Problem("phases", "is empty: a run needs at least one phase with tokens, seq_len, global_batch and lr")
    first_named: dict[str, int] = {}
    for index, phase in enumerate(phases):
        yield from _phase(f"phases.{index}", phase)
        earlier = first_named.setdefault(phase.name, index)
        if earlier != index:
            yield Problem(f"phases.{index}.name", f"is {phase.name!r}, as is that of phases.{earlier}: give it another")


def _phase(where: str, phase: PhaseConfig) -> Iterator[Problem]:
    if not phase.name.strip():
        yield Problem(f"{where}.name", "is empty: give the phase a name")
    yield from _above_zero({f"{where}.lr": phase.lr})
    sizes = {name: getattr(phase, name) for name in ("seq_len", "global_batch", "micro_batch")}
    unusable = list(_at_least(1, {f"{where}.{name}": size for name, size in sizes.items()}))
    yield from unusable
    if unusable:
        return
    if phase.global_batch % phase.micro_batch:
        fitting = _divisors_near(phase.global_batch, phase.micro_batch)
        yield Problem(
            f"{where}.micro_batch",
            f"is {phase.micro_batch}, must divide global_batch={phase.global_batch}: {choice(fitting)}",
        )
    try:
        tokens = parse_tokens(phase.tokens)
    except ValueError as error:
        yield Problem(f"{where}.tokens", str(error))
        return
    if tokens < phase.tokens_per_step:
        yield Problem(
            f"{where}.tokens",
            f"is {phase.tokens}, less than one step of seq_len={phase.seq_len} x global_batch={phase.global_batch}: "
            f"use at least {phase.tokens_per_step}",
        )


def _optim(optim: OptimConfig) -> Iterator[Problem]:
    if len(optim.betas) != 2:
        yield Problem("optim.betas", f"has {len(optim.betas)} values, must have two, such as [0.9, 0.95]")
    for index, beta in enumerate(optim.betas):
        if not 0 <= beta < 1:
            yield Problem(f"optim.betas.{index}", f"is {beta}, must be at least 0 and below 1, such as 0.9 and 0.95")
    yield from _above_zero({"optim.eps": optim.eps, "optim.clip": optim.clip})
    yield from _at_least(0, {"optim.weight_decay": optim.weight_decay, "optim.z_loss": optim.z_loss})
    yield from _at_least(1, {"optim.skips": optim.skips})
    if optim.spike is not None and not 0 < optim.spike < math.inf:
        yield Problem("optim.spike", f"is {optim.spike}, must be a number of deviations above 0 such as 6, or null")
    if not 0 <= optim.final_lr <= 1:
        yield Problem("optim.final_lr", f"is {optim.final_lr}, must be between 0 and 1: a fraction of each phase's lr")


def _durations(optim: OptimConfig, phases: list[PhaseConfig]) -> Iterator[Problem]:
    """Warm-up and decay can be read, and there is room for both in every phase."""
    lengths = {"warmup": optim.warmup} | ({"decay": optim.decay} if optim.schedule == Schedule.wsd else {})
    unreadable = [p for key, text in lengths.items() if (p := _unreadable_share(f"optim.{key}", text))]
    yield from unreadable
    if unreadable:
        return
    for index, phase in enumerate(phases):
        try:
            whole = parse_tokens(phase.tokens)
        except ValueError:
            continue  # told by the phase's own rules
        needed = {key: parse_share(text, whole) for key, text in lengths.items()}
        if sum(needed.values()) > whole:
            both = " together with optim.decay" if "decay" in needed else ""
            yield Problem(
                "optim.warmup",
                f"takes {readable(sum(needed.values()))} tokens{both}, more than phases.{index} has: "
                f"use at most {readable(whole)}, or a share such as 1%",
            )


def _unreadable_share(key: str, text: str) -> Problem | None:
    try:
        parse_share(text, 1)
    except ValueError as error:
        return Problem(key, str(error))
    return None


def _run(run: RunConfig) -> Iterator[Problem]:
    if not run.name.strip():
        yield Problem("run.name", "is empty: the run's folder is named after it")
    yield from _interval("run.eval_every", run.eval_every)
    yield from _at_least(0, {"run.seed": run.seed, "run.sample_tokens": run.sample_tokens})
    yield from _at_least(1, {"run.log_every": run.log_every})
    yield from _above_zero({"run.timeout": run.timeout})
    if run.max_minutes is not None:
        yield from _above_zero({"run.max_minutes": run.max_minutes})
    if run.max_steps is not None:
        yield from _at_least(1, {"run.max_steps": run.max_steps})
    yield from _at_least(1, {f"run.eval_lengths.{index}": times for index, times in enumerate(run.eval_lengths)})
    yield from _at_least(1, {f"run.profile.{index}": step for index, step in enumerate(run.profile)})
    if run.wandb is not None and importlib.util.find_spec("wandb") is None:
        yield Problem("run.wandb", f"is {run.wandb!r}, but wandb is not installed: pip install wandb, or leave it out")
    if run.resume not in ("auto", "never") and not Path(run.resume).is_dir():
        yield Problem("run.resume", f"is {run.resume!r}, which is no folder; use auto, never, or a checkpoint's folder")


def _validation(run: RunConfig, phases: list[PhaseConfig]) -> Iterator[Problem]:
    """There are tokens for at least one row of the longest length that is read."""
    try:
        tokens = parse_tokens(run.eval_tokens)
    except ValueError as error:
        yield Problem("run.eval_tokens", str(error))
        return
    times = max(run.eval_lengths, default=1)
    longest = max((phase.seq_len for phase in phases), default=0) * times
    if tokens < longest:
        yield Problem(
            "run.eval_tokens",
            f"is {run.eval_tokens}, less than one row at {times} x seq_len: use at least {longest}, or smaller "
            "run.eval_lengths",
        )


def _checkpoint(checkpoint: CheckpointConfig) -> Iterator[Problem]:
    yield from _interval("checkpoint.every", checkpoint.every)
    if checkpoint.keep_every is not None:
        yield from _interval("checkpoint.keep_every", checkpoint.keep_every)
    if checkpoint.mirror is not None and not re.fullmatch(r"s3://[^/]+/.+", checkpoint.mirror):
        yield Problem("checkpoint.mirror", f"is {checkpoint.mirror!r}, must be s3://BUCKET/PREFIX, or left out")
    yield from _at_least(1, {"checkpoint.keep": checkpoint.keep, "checkpoint.failures": checkpoint.failures})


def _cluster(cluster: ClusterConfig) -> Iterator[Problem]:
    known = {"cluster.peak_tflops": cluster.peak_tflops, "cluster.memory_gb": cluster.memory_gb}
    yield from _above_zero({key: value for key, value in known.items() if value is not None})


def _at_least(least: int, values: dict[str, int] | dict[str, float]) -> Iterator[Problem]:
    return _unless(lambda value: value >= least, f"must be at least {least}", values)


def _above_zero(values: dict[str, float]) -> Iterator[Problem]:
    return _unless(lambda value: 0 < value < math.inf, "must be a number above 0", values)


def _unless(fits: Callable[[float], bool], rule: str, values: dict[str, int] | dict[str, float]) -> Iterator[Problem]:
    for key, value in values.items():
        if not fits(value):
            yield Problem(key, f"is {value}, {rule}")


def _interval(key: str, text: str) -> Iterator[Problem]:
    """Steps as a plain number, or tokens with a unit."""
    try:
        steps = parse_steps(text, 1)
    except ValueError:
        yield Problem(key, f"is {text!r}, must be a number of steps such as 1000, or {FORMS}")
        return
    if steps < 1:
        yield Problem(key, f"is {text}, must be at least 1 step")


def _divisors_near(whole: int, size: int) -> list[int]:
    """The largest divisor below, and the smallest above."""
    divisors = [d for d in range(1, min(whole, 2 * size) + 1) if whole % d == 0]
    below = [d for d in divisors if d < size][-1:]
    above = [d for d in divisors if d > size][:1]
    return below + above
