"""Every rule that a configuration must keep and its types can't say.

Each function looks at one section and lists what is wrong there, with the value that would work; `check` reports all
of it at once, before torch is imported or a process group exists. What a phase may change is checked as it is in each
phase: the rules name the key of the run's section, and `ResolvedPhase.key` finds the one that a person has set. The
rules of `phases`, `data`, `states`, `precision`, and of `parallel`, which reach into all other sections, stand in
`checks/`. What can be said of the data itself (that it can be read, that
its vocabulary fits, that there is enough of it) stands in `data/mixture_spec.py`.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Iterator

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.model import ModelConfig, Start
from hybridtron.architecture.pattern import RESERVED, PatternError, parse
from hybridtron.architecture.table import letter_specs
from hybridtron.config.checks.data import data_problems
from hybridtron.config.checks.export import export_folder_problems, export_problems
from hybridtron.config.checks.parallel import parallel_problems
from hybridtron.config.checks.phases import phase_problems
from hybridtron.config.checks.precision import precision_problems, precision_warnings
from hybridtron.config.checks.states import states_problems, states_warnings
from hybridtron.config.layout import chunk_count
from hybridtron.config.lr_shapes import SHAPES
from hybridtron.config.resolve import ResolvedPhase, last_step, resolve
from hybridtron.config.rules import LARGEST, above_zero, at_least, is_folder, shortened
from hybridtron.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    OptimConfig,
    PhaseConfig,
    RunConfig,
)
from hybridtron.config.units import FORMS, parse_steps, parse_tokens
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.problems import ConfigError, Problem, did_you_mean
from hybridtron.requirements import missing


def check(config: Config, world_size: int | None = None) -> list[Problem]:
    """All that is wrong with the configuration; empty where it can run on N processes (None: on the fewest)."""
    phases = resolve(config)
    of_phases = list(phase_problems(config, phases))
    found = [
        *of_phases,
        *export_problems(phases),
        *([] if of_phases else [*export_folder_problems(config, phases), *_profile(config)]),
        *data_problems(config),
        *_run(config.run),
        *_validation(config.run, config.phases),
        *_checkpoint(config.checkpoint),
        *_cluster(config.cluster),
    ]
    for phase in phases:
        found += [Problem(phase.key(one.key), one.message) for one in _as_trained(phase, world_size)]
    return list(dict.fromkeys(found))


def _as_trained(phase: ResolvedPhase, world_size: int | None) -> Iterator[Problem]:
    """What is wrong with all that a phase may change, as it is in this phase; keys are those of the run's sections."""
    longest = max((one.seq_len for one in phase.config.phases if one.seq_len > 0), default=sys.maxsize)
    yield from model_problems(phase.model, longest)
    yield from states_problems(phase)
    yield from _optim(phase.optim)
    yield from parallel_problems(phase, world_size)
    yield from precision_problems(phase)


def require(config: Config, world_size: int | None = None) -> None:
    """Raise ConfigError with everything that is wrong, if anything is."""
    if found := check(config, world_size):
        raise ConfigError(found)


def warnings(config: Config) -> list[str]:
    """What is set and has no effect, or another than it looks, one sentence each.

    Of a configuration that `check` finds nothing wrong with.
    """
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
    if not SHAPES[config.optim.schedule].uses_decay and config.optim.decay != OptimConfig.decay:
        users = " or ".join(name for name, shape in SHAPES.items() if shape.uses_decay)
        found.append(f"optim.decay={config.optim.decay} has no effect: it belongs to optim.schedule={users}")
    if config.model.init is not Start.mamba and config.model.embedding_std != ModelConfig.embedding_std:
        found.append(f"model.embedding_std={config.model.embedding_std} has no effect: it belongs to model.init=mamba")
    return [*found, *states_warnings(resolve(config)), *precision_warnings(config.precision)]


def model_problems(model: ModelConfig, longest: int = sys.maxsize) -> Iterator[Problem]:
    """What is wrong with a model that reads rows of up to `longest` tokens."""
    yield from at_least(1, {"model.width": model.width, "model.vocab_size": model.vocab_size})
    yield from above_zero({"model.norm_eps": model.norm_eps, "model.embedding_std": model.embedding_std})
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
    for letter, spec in specs.items():
        for problem in spec.problems(ModelSizes(model.width, num_sublayers), longest):
            yield Problem(f"model.layers.{letter}.{problem.key}", problem.message)


def _optim(optim: OptimConfig) -> Iterator[Problem]:
    if optim.name not in OPTIMIZERS:
        near = did_you_mean(optim.name, OPTIMIZERS)
        yield Problem("optim.name", f"is {optim.name!r}{near}, must be one of {', '.join(OPTIMIZERS)}")
    if optim.schedule not in SHAPES:
        near = did_you_mean(optim.schedule, SHAPES)
        yield Problem("optim.schedule", f"is {optim.schedule!r}{near}, must be one of {', '.join(SHAPES)}")
    if len(optim.betas) != 2:
        yield Problem("optim.betas", f"has {len(optim.betas)} values, must have two, such as [0.9, 0.95]")
    for index, beta in enumerate(optim.betas):
        if not 0 <= beta < 1:
            yield Problem(f"optim.betas.{index}", f"is {beta}, must be at least 0 and below 1, such as 0.9 and 0.95")
    yield from above_zero({"optim.eps": optim.eps, "optim.clip": optim.clip})
    yield from at_least(0, {"optim.weight_decay": optim.weight_decay, "optim.z_loss": optim.z_loss})
    yield from at_least(1, {"optim.skips": optim.skips})
    if optim.spike is not None and not 0 < optim.spike < math.inf:
        yield Problem("optim.spike", f"is {optim.spike}, must be a number of deviations above 0 such as 6, or null")
    if not 0 <= optim.final_lr <= 1:
        yield Problem("optim.final_lr", f"is {optim.final_lr}, must be between 0 and 1: a fraction of each phase's lr")


def _run(run: RunConfig) -> Iterator[Problem]:
    if not run.name.strip():
        yield Problem("run.name", "is empty: the run's folder is named after it")
    if not run.dir.strip():
        yield Problem("run.dir", "is empty: name a folder, or leave it out for runs/NAME")
    yield from _interval("run.eval_every", run.eval_every)
    yield from at_least(0, {"run.seed": run.seed, "run.sample_tokens": run.sample_tokens})
    if run.seed > LARGEST:
        yield Problem("run.seed", f"is {run.seed}, must be at most {LARGEST}")
    yield from at_least(1, {"run.log_every": run.log_every})
    if not run.timeout >= 1:
        yield Problem("run.timeout", f"is {run.timeout}, must be at least 1 second, and longer than a step takes")
    if run.max_minutes is not None:
        yield from above_zero({"run.max_minutes": run.max_minutes})
    if run.max_steps is not None:
        yield from at_least(1, {"run.max_steps": run.max_steps})
    if not run.eval_lengths:
        yield Problem("run.eval_lengths", "is empty, must hold a multiple of seq_len, such as [1] or [1,2,4]")
    yield from at_least(1, {f"run.eval_lengths.{index}": times for index, times in enumerate(run.eval_lengths)})
    yield from at_least(1, {f"run.profile.{index}": step for index, step in enumerate(run.profile)})
    if run.wandb is not None and importlib.util.find_spec("wandb") is None:
        yield Problem("run.wandb", f"is {run.wandb!r}, but wandb is not installed: make setup-metrics, or leave it out")
    if run.resume not in ("auto", "never") and not is_folder(run.resume):
        yield Problem(
            "run.resume", f"is {shortened(run.resume)!r}, which is no folder; use auto, never, or a checkpoint's folder"
        )


def _profile(config: Config) -> Iterator[Problem]:
    """The steps to trace are steps of the run."""
    last = last_step(config)
    for index, step in enumerate(config.run.profile):
        if step > last:
            yield Problem(f"run.profile.{index}", f"is {step}, beyond the run's last step, {last}")


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
    elif checkpoint.mirror is not None and (fault := missing("s3")):
        yield Problem("checkpoint.mirror", f"is {checkpoint.mirror}, and {fault}")
    yield from at_least(1, {"checkpoint.keep": checkpoint.keep, "checkpoint.failures": checkpoint.failures})


def _cluster(cluster: ClusterConfig) -> Iterator[Problem]:
    known = {"cluster.peak_tflops": cluster.peak_tflops, "cluster.memory_gb": cluster.memory_gb}
    yield from above_zero({key: value for key, value in known.items() if value is not None})


def _interval(key: str, text: str) -> Iterator[Problem]:
    """Steps as a plain number, or tokens with a unit."""
    try:
        steps = parse_steps(text, 1)
    except ValueError:
        yield Problem(key, f"is {text!r}, must be a number of steps such as 1000, or {FORMS}")
        return
    if steps < 1:
        yield Problem(key, f"is {text}, must be at least 1 step")
