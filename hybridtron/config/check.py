"""All rules between keys of the configuration, which types cannot express.

The values that a single key can have are declared at its field (`limits.py`). Here, each function examines one section
and lists its problems, each with a value that would work. `check` reports all of them at once, before torch is imported
or a process group exists. Sections that a phase may change are checked as they are in each phase: a rule names the key
of the run's section, and `ResolvedPhase.key` finds the key that the user has set.

The rules of `phases`, `states`, `precision`, `parallel` and exports are in `checks/`, as they reach into other
sections. The rules that need the data itself (it can be read, its vocabulary fits, it suffices) are in
`data/problems.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from hybridtron.architecture.adapters import AdaptersConfig, adapter_problems
from hybridtron.architecture.model import ModelConfig, Start
from hybridtron.architecture.pattern import parse
from hybridtron.architecture.table import architecture, parameter_table
from hybridtron.config.checks.export import export_folder_problems, export_problems
from hybridtron.config.checks.parallel import parallel_problems
from hybridtron.config.checks.phases import phase_problems
from hybridtron.config.checks.precision import precision_problems, precision_warnings
from hybridtron.config.checks.states import states_problems, states_warnings
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.layout import chunk_count
from hybridtron.config.lr_shapes import SHAPES
from hybridtron.config.resolve import ResolvedPhase, RunPlan, last_step, resolve
from hybridtron.config.saved import spelled_secrets
from hybridtron.config.schema import Config, Feed, OptimConfig, PhaseConfig, RunConfig
from hybridtron.config.units import parse_tokens
from hybridtron.limits import is_folder, limit_problems, shortened
from hybridtron.problems import ConfigError, Problem
from hybridtron.requirements import is_there, missing


def check(config: Config, world_size: int | None = None) -> list[Problem]:
    """List all problems with a configuration; an empty list means that it can run.

    `world_size` is the number of processes; None stands for the fewest that the layout needs.
    """
    phases = resolve(config)
    of_phases = [*limit_problems(config.phases, "phases"), *phase_problems(config, phases)]
    problems = [
        *of_phases,
        *export_problems(phases),
        *([] if of_phases else [*export_folder_problems(config, phases), *_profile(config)]),
        *_run(config.run),
        *_validation(config.run, config.phases),
        *_mirror(config.checkpoint.mirror),
        *spelled_secrets(asdict(config)),
    ]
    for section in ("run", "checkpoint", "cluster", "parallel"):
        problems += limit_problems(getattr(config, section), section)
    for phase in phases:
        problems += [replace(problem, key=phase.key(problem.key)) for problem in _as_trained(phase, world_size)]
    return list(dict.fromkeys(problems))


def _as_trained(phase: ResolvedPhase, world_size: int | None) -> Iterator[Problem]:
    """Check all sections that a phase may change, with this phase's values.

    The keys are those of the run's sections; `check` translates them to the phase's own.
    """
    longest = max((settings.seq_len for settings in phase.config.phases if settings.seq_len > 0), default=sys.maxsize)
    of_model = model_problems(phase.model, longest)
    yield from of_model
    if (adapters := phase.model.adapters) is not None and not of_model:
        table = parameter_table(replace(phase.model, adapters=None))
        yield from (problem.below("model.adapters") for problem in adapter_problems(table, adapters))
        yield from _adapter_dropout(phase, adapters)
    for section in ("data", "states", "optim", "precision"):
        yield from limit_problems(getattr(phase, section), section)
    if phase.data.feed is Feed.dali and not is_there("nvidia.dali"):
        yield Problem(
            "data.feed",
            "not-installed",
            "is dali, which is not installed: `make setup-dali` adds it, or use data.feed=torch",
        )
    yield from states_problems(phase)
    yield from _optim(phase.optim)
    yield from parallel_problems(phase, world_size)
    yield from precision_problems(phase)


def _adapter_dropout(phase: ResolvedPhase, adapters: AdaptersConfig) -> Iterator[Problem]:
    """Refuse dropout for ranks that read as many rows as tokens per row: its random mask would confuse the two."""
    if (context := phase.config.parallel.context) < 1:
        return  # reported by its limit
    length = phase.settings.seq_len // context
    if adapters.dropout and length == phase.settings.micro_batch:
        how = f"knows tokens from rows by their number, but a rank reads {length} rows of {length} tokens"
        yield Problem("model.adapters.dropout", "unsupported", f"{how} at a time: use another micro_batch, or 0")


def require(config: Config, world_size: int | None = None) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if problems := check(config, world_size):
        raise ConfigError(problems)


def warnings(plan: RunPlan) -> list[str]:
    """List settings that have no effect, or a surprising one, a sentence each.

    The configuration must have passed `check`.
    """
    config = plan.config
    pattern = parse(config.model.pattern, config.model.layers)
    texts = [
        f"model.layers.{letter} is defined, but model.pattern does not use it"
        for letter in config.model.layers
        if letter not in pattern.letters
    ]
    if config.parallel.sequence and config.parallel.tensor == 1:
        texts.append("parallel.sequence=true has no effect: it belongs to parallel.tensor of at least 2")
    if config.parallel.regather and not (config.parallel.sequence and config.parallel.tensor > 1):
        texts.append("parallel.regather=true has no effect: it belongs to parallel.sequence=true on several ranks")
    elif config.parallel.regather and (config.parallel.transformer_engine or config.precision.name in FP8_MULTIPLES):
        texts.append("parallel.regather=true has no effect on layers of Transformer Engine, or that multiply in FP8")
    if len(pattern.stages) > 1 and chunk_count(config.parallel) == 1:
        texts.append("model.pattern has stage borders, which parallel.pipeline=1 does not use")
    if not SHAPES[config.optim.schedule].uses_decay and config.optim.decay != OptimConfig.decay:
        users = " or ".join(name for name, shape in SHAPES.items() if shape.uses_decay)
        texts.append(f"optim.decay={config.optim.decay} has no effect: it belongs to optim.schedule={users}")
    if config.model.init is not Start.mamba and config.model.embedding_std != ModelConfig.embedding_std:
        texts.append(f"model.embedding_std={config.model.embedding_std} has no effect: it belongs to model.init=mamba")
    return [*texts, *states_warnings(plan.phases), *precision_warnings(config.precision)]


def model_problems(model: ModelConfig, longest: int = sys.maxsize) -> Sequence[Problem]:
    """List a model's problems with rows up to `longest` tokens."""
    try:
        architecture(model, longest)
    except ConfigError as error:
        return error.problems
    return ()


def _optim(optim: OptimConfig) -> Iterator[Problem]:
    if len(optim.betas) != 2:
        yield Problem("optim.betas", "wrong-type", f"has {len(optim.betas)} values, must have two, such as [0.9, 0.95]")


def _run(run: RunConfig) -> Iterator[Problem]:
    if not run.eval_lengths:
        yield Problem(
            "run.eval_lengths", "missing", "is empty, must hold a multiple of seq_len, such as [1] or [1,2,4]"
        )
    if run.wandb is not None and importlib.util.find_spec("wandb") is None:
        yield Problem(
            "run.wandb",
            "not-installed",
            f"is {run.wandb!r}, but wandb is not installed: make setup-metrics, or leave it out",
        )
    if run.resume not in ("auto", "never") and not is_folder(run.resume):
        cure = "use auto, never, or a checkpoint's folder"
        yield Problem("run.resume", "no-file", f"is {shortened(run.resume)!r}, which is not a folder; {cure}")


def _profile(config: Config) -> Iterator[Problem]:
    """Check that the steps to trace lie within the run."""
    last = last_step(config)
    for index, step in enumerate(config.run.profile):
        if step > last:
            yield Problem(f"run.profile.{index}", "out-of-range", f"is {step}, beyond the run's last step, {last}")


def _validation(run: RunConfig, phases: list[PhaseConfig]) -> Iterator[Problem]:
    """Check that `run.eval_tokens` suffices for one row of the longest evaluated length."""
    times = max(run.eval_lengths, default=1)
    longest = max((phase.seq_len for phase in phases), default=0) * times
    with suppress(ValueError):  # reported by its limit
        if 0 < parse_tokens(run.eval_tokens) < longest:
            cure = f"use at least {longest}, or smaller run.eval_lengths"
            yield Problem(
                "run.eval_tokens",
                "does-not-fit",
                f"is {run.eval_tokens}, less than one row at {times} x seq_len: {cure}",
            )


def _mirror(mirror: str | None) -> Iterator[Problem]:
    if mirror is not None and (fault := missing("s3")):
        yield Problem("checkpoint.mirror", "unsupported", f"is {mirror}, and {fault}")
