"""Check a configuration by all rules that field types cannot express, and list all problems at once.

The limits on a single key are declared at the key's field (`limits.py`). The functions here and in `checks/` check
rules that involve several keys. Rules that need the data are in `data/problems.py`: the data must be readable, fit the
vocabulary and suffice for the run. The checks run before torch is imported and before a process group exists.

A phase may override some sections of the configuration. The rules for such a section are checked once for each phase,
with the phase's values. They report a problem under the run's key, such as `optim.clip`. If the phase overrides that
key, `check` replaces it by the phase's own key, such as `phases.1.optim.clip`. `ResolvedPhase.key` finds this key.
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
from hybridtron.architecture.table import architecture
from hybridtron.config.checks.corruption import corruption_problems
from hybridtron.config.checks.experts import expert_problems, expert_warnings
from hybridtron.config.checks.export import export_folder_problems, export_problems
from hybridtron.config.checks.graphs import graph_problems
from hybridtron.config.checks.parallel import parallel_problems
from hybridtron.config.checks.phases import phase_problems
from hybridtron.config.checks.precision import precision_problems, precision_warnings
from hybridtron.config.checks.states import states_problems, states_warnings
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.lr_shapes import SHAPES
from hybridtron.config.pipeline_layout import chunk_count
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.saved import spelled_secrets
from hybridtron.config.schema import Feed, OptimConfig, PhaseConfig, RunConfig
from hybridtron.config.units import parse_tokens
from hybridtron.config.update_rule import (
    fresh_state_warnings,
    transfer_problems,
    unread_by_phases,
    update_rule_warnings,
)
from hybridtron.limits import is_folder, limit_problems, shortened
from hybridtron.problems import ConfigError, Problem
from hybridtron.requirements import install_command, is_there, missing


def check(plan: RunPlan, world_size: int | None = None) -> list[Problem]:
    """List all problems in a run's configuration. The list is empty if the run can start.

    `world_size` is the number of processes; None stands for the smallest number that the parallel layout needs.
    """
    config = plan.config
    phases = plan.phases
    of_phases = [*limit_problems(config.phases, "phases"), *phase_problems(config, phases)]
    problems = [
        *of_phases,
        *export_problems(phases),
        *([] if of_phases else [*export_folder_problems(config, phases), *_profile(plan)]),
        *_run(config.run),
        *_validation(config.run, config.phases),
        *_mirror(config.checkpoint.mirror),
        *unread_by_phases(phases),
        *spelled_secrets(asdict(config)),
    ]
    for section in ("run", "checkpoint", "cluster", "parallel"):
        problems += limit_problems(getattr(config, section), section)
    for phase in phases:
        problems += [replace(problem, key=phase.key(problem.key)) for problem in _as_trained(phase, world_size)]
    return list(dict.fromkeys(problems))


def _as_trained(phase: ResolvedPhase, world_size: int | None) -> Iterator[Problem]:
    """List problems in the sections that a phase may change, with this phase's values.

    The problems name keys in the run's sections, which `check` replaces by the phase's own keys.
    """
    longest = max((settings.seq_len for settings in phase.config.phases if settings.seq_len > 0), default=sys.maxsize)
    of_model = model_problems(phase.model, longest)
    yield from of_model
    if (adapters := phase.model.adapters) is not None and not of_model:
        table = phase.arch.base_table
        yield from (problem.below("model.adapters") for problem in adapter_problems(table, adapters))
        yield from _adapter_dropout(phase, adapters)
    for section in ("data", "states", "optim", "precision"):
        yield from limit_problems(getattr(phase, section), section)
    if phase.data.feed is Feed.dali and not is_there("nvidia.dali"):
        yield Problem(
            "data.feed",
            "not-installed",
            "is dali, but NVIDIA DALI is not installed: install DALI with `make setup-dali`, or use data.feed=torch",
        )
    yield from states_problems(phase)
    yield from _optim(phase.optim)
    yield from transfer_problems(phase.optim, phase.model)
    yield from parallel_problems(phase, world_size)
    yield from precision_problems(phase)
    yield from expert_problems(phase)
    yield from graph_problems(phase, world_size)
    yield from corruption_problems(phase, world_size)


def _adapter_dropout(phase: ResolvedPhase, adapters: AdaptersConfig) -> Iterator[Problem]:
    """Report dropout in adapters if a rank's micro-batch has as many rows as tokens per row.

    The function that draws the random mask distinguishes the row axis from the token axis by their lengths.
    """
    if (context := phase.config.parallel.context) < 1:
        return  # `limit_problems` reports a context below 1
    length = phase.settings.seq_len // context
    if adapters.dropout and length == phase.settings.micro_batch:
        how = f"needs different numbers of rows and tokens, but a rank reads {length} rows of {length} tokens"
        yield Problem("model.adapters.dropout", "unsupported", f"{how}: use another micro_batch, or dropout 0")


def require(plan: RunPlan, world_size: int | None = None) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if problems := check(plan, world_size):
        raise ConfigError(problems)


def warnings(plan: RunPlan) -> list[str]:
    """Return a sentence for each setting that has no effect or a surprising effect.

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
        texts.append("parallel.sequence=true has no effect without parallel.tensor of at least 2")
    if config.parallel.regather and not (config.parallel.sequence and config.parallel.tensor > 1):
        texts.append(
            "parallel.regather=true has no effect without parallel.sequence=true and parallel.tensor of at least 2"
        )
    elif config.parallel.regather and (config.parallel.transformer_engine or config.precision.name in FP8_MULTIPLES):
        texts.append("parallel.regather=true has no effect on layers that use Transformer Engine or FP8")
    if len(pattern.stages) > 1 and chunk_count(config.parallel) == 1:
        texts.append("model.pattern has stage boundaries (|), which have no effect with parallel.pipeline=1")
    if not SHAPES[config.optim.schedule].uses_decay and config.optim.decay != OptimConfig.decay:
        users = " or ".join(name for name, shape in SHAPES.items() if shape.uses_decay)
        texts.append(f"optim.decay={config.optim.decay} has no effect without optim.schedule={users}")
    if config.model.init is not Start.mamba and config.model.embedding_std != ModelConfig.embedding_std:
        texts.append(f"model.embedding_std={config.model.embedding_std} has no effect without model.init=mamba")
    return [
        *texts,
        *states_warnings(plan.phases),
        *precision_warnings(config.precision),
        *expert_warnings(plan.phases),
        *update_rule_warnings(plan.phases),
        *fresh_state_warnings(plan.phases),
    ]


def model_problems(model: ModelConfig, longest: int = sys.maxsize) -> Sequence[Problem]:
    """List the problems of a model that reads rows with up to `longest` tokens."""
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
            "run.eval_lengths",
            "missing",
            "is empty, must have at least one multiple of seq_len, such as [1] or [1,2,4]",
        )
    if run.wandb is not None and importlib.util.find_spec("wandb") is None:
        yield Problem(
            "run.wandb",
            "not-installed",
            f"is {run.wandb!r}, but wandb is not installed: run `make setup-metrics`, or leave run.wandb out",
        )
    if run.mlflow is not None and importlib.util.find_spec("mlflow") is None:
        command = install_command(["mlflow-skinny"], ["mlflow"])
        yield Problem(
            "run.mlflow",
            "not-installed",
            f"is {run.mlflow!r}, but mlflow is not installed: run `{command}`, or leave run.mlflow out",
        )
    if run.resume not in ("auto", "never") and not is_folder(run.resume):
        cure = "use auto, never, or a checkpoint's folder"
        yield Problem("run.resume", "no-file", f"is {shortened(run.resume)!r}, which is not a folder; {cure}")


def _profile(plan: RunPlan) -> Iterator[Problem]:
    """Report steps in `run.profile` beyond the run's last step."""
    last = plan.last_step
    for index, step in enumerate(plan.config.run.profile):
        if step > last:
            yield Problem(f"run.profile.{index}", "out-of-range", f"is {step}, beyond the run's last step, {last}")


def _validation(run: RunConfig, phases: list[PhaseConfig]) -> Iterator[Problem]:
    """Report `run.eval_tokens` if it is smaller than the longest evaluated row."""
    times = max(run.eval_lengths, default=1)
    longest = max((phase.seq_len for phase in phases), default=0) * times
    with suppress(ValueError):  # `limit_problems` reports a text that can't be parsed
        if 0 < parse_tokens(run.eval_tokens) < longest:
            cure = f"use at least {longest}, or smaller run.eval_lengths"
            yield Problem(
                "run.eval_tokens",
                "does-not-fit",
                f"is {run.eval_tokens}, less than one row of {times} x seq_len tokens: {cure}",
            )


def _mirror(mirror: str | None) -> Iterator[Problem]:
    if mirror is not None and (fault := missing("s3")):
        yield Problem("checkpoint.mirror", "unsupported", f"is {mirror}, but {fault}")
