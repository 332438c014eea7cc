"""Starting point of a run or phase: a checkpoint to resume, weights of another run, or none.

The checks here compare the model, the weights and the data with the checkpoint's, and raise ConfigError if they don't
fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtron.architecture.base import LayerOwner, Parameter
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import parameter_table
from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.merged import merged
from hybridtron.config.checks.precision import needs
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.schema import Config
from hybridtron.config.weights import BEST, folder_of
from hybridtron.data.loader import Fingerprint
from hybridtron.device import compute_device
from hybridtron.model.init import starting_value
from hybridtron.ops.registry import force_problems
from hybridtron.parallel.transformer_engine import fp8_fault
from hybridtron.problems import ConfigError, Problem

LOG = logging.getLogger(__name__)


def starting_point(config: Config) -> Checkpoint | None:
    """Return the checkpoint to resume from as `run.resume` says, or None to start from scratch.

    With `auto` it is the newest one in the run's folder that is complete by its manifest. Raises ConfigError if the
    folder has only broken ones, or if a named one can't be opened.
    """
    if config.run.resume == "never":
        return None
    if config.run.resume != "auto":
        return opened(Path(config.run.resume), "run.resume", "name a whole checkpoint, or use auto or never")
    run_dir = Path(config.run.dir)
    checkpoint = checkpoints.newest(run_dir)
    if checkpoint is None and (broken := checkpoints.all_of(run_dir)):
        cure = "start from scratch with run.resume=never, or name another checkpoint"
        raise ConfigError(
            [Problem("run.resume", "unreadable", f"finds {len(broken)} checkpoints, but none is valid; {cure}")]
        )
    return checkpoint


def given_weights(config: Config) -> Checkpoint | None:
    """Return the checkpoint that `run.weights` names, with its adapters merged. None if it is not set."""
    if config.run.weights is None:
        return None
    return merged(_named(config.run.weights, "run.weights"))


def _named(named: str, key: str) -> Checkpoint:
    """Return the checkpoint that the value of a key names; raise ConfigError if there is none.

    The value is a checkpoint folder, a run's folder for its newest, or RUN@best for its lowest held-out loss.
    """
    path = Path(folder_of(named))
    cure = "name a run's folder that has one, or a whole checkpoint"
    if named.endswith(BEST):
        if (checkpoint := checkpoints.best(path)) is None:
            why = f"{path} has no checkpoint with a held-out loss; checkpoints store it only at evaluation steps"
            raise ConfigError([Problem(key, "no-file", f"{why} (run.eval_every): name another folder")])
        return checkpoint
    if not (path / "checkpoints").exists():
        return opened(path, key, cure)
    checkpoint = checkpoints.newest(path)
    if checkpoint is None:
        raise ConfigError([Problem(key, "no-file", f"{path} has no checkpoint; {cure}")])
    return checkpoint


def opened(path: Path, key: str, cure: str) -> Checkpoint:
    """Open a checkpoint folder. Raises ConfigError under `key`, with `cure` as advice, if it is broken."""
    try:
        return Checkpoint.open(path)
    except BrokenCheckpoint as error:
        raise ConfigError([Problem(key, "unreadable", f"{error}; {cure}")]) from error


def weights_for(phase: ResolvedPhase) -> Checkpoint | None:
    """Return the checkpoint that a phase's `init_from` names, with its adapters merged. None if it is not set.

    Raises ConfigError if its weights don't fit the phase's model.
    """
    if phase.settings.init_from is None:
        return None
    key = phase.own_key("init_from")
    checkpoint = merged(_named(phase.settings.init_from, key))
    check_same_weights(checkpoint, phase.model, key)
    return checkpoint


def check_same_model(start: Checkpoint, plan: RunPlan) -> None:
    """Raise ConfigError if the configured model or optimizer differs from the checkpoint that the run resumes from."""
    differences = _differences(start, plan.phase_ending_at(start.meta.step).model)
    if (stored := start.config.optim.name) != (wanted := plan.config.optim.name):
        differences.append(("optim.name", f"is {wanted}, but {start.folder} holds the state of {stored}"))
    if differences:
        raise ConfigError(
            [Problem(key, "changed", f"{message}: set it so, or run.resume=never") for key, message in differences]
        )


def check_same_weights(given: Checkpoint, model: ModelConfig, key: str, may_grow: bool = False) -> list[str]:
    """Raise ConfigError unless a checkpoint's weights fit a model by name and shape; return lines on how they differ.

    The model may use its weights in another way: attention may get another window, or become span attention. With
    `may_grow` it may also have optional weights that the checkpoint lacks. The lines name the changed keys and the new
    weights. The adapters of `given` must be merged; those of `model` begin with the phase and are ignored.
    """
    model = replace(model, adapters=None)  # they begin with the phase
    differences = _differences(given, model)
    stored, expected = (parameter_table(config) for config in (given.config.model, model))
    new = {name: weight for name, weight in expected.items() if name not in stored and weight.grown is not None}
    same = {name: weight for name, weight in expected.items() if name not in new or not may_grow}
    shapes = [{name: (weight.shape, weight.parts) for name, weight in table.items()} for table in (stored, same)]
    if shapes[0] != shapes[1]:
        cure = f"set it so, or name another {key}"
        raise ConfigError([Problem(key, "mismatch", f"{message}: {cure}") for key, message in differences])
    return [f"{key} {message}" for key, message in differences] + _new_weights(new)


def _new_weights(new: Mapping[str, Parameter]) -> list[str]:
    """Describe new weights: one line for each name within a sub-layer, with its layers and its initial value."""
    layers: dict[tuple[str, str], list[str]] = {}
    for name, weight in new.items():
        assert isinstance(weight.owner, LayerOwner)
        key = name.removeprefix(f"{weight.owner.path}.")
        if isinstance(weight.grown, tuple):
            start = f"a copy of {' and '.join(weight.grown)}"
        else:
            start = str(weight.grown)
        layers.setdefault((key, start), []).append(str(weight.owner.index))
    return [f"{key} is new in layers {', '.join(on)} and starts as {start}" for (key, start), on in layers.items()]


def weights_of(given: Checkpoint, phase: ResolvedPhase) -> Callable[[str], Tensor]:
    """Return a function that reads a phase's full weights by name from a checkpoint.

    A weight that the checkpoint lacks starts as the parameter table says: from an initializer, or as a concatenation of
    its sub-layer's other weights.
    """
    table = phase.table
    stored = parameter_table(given.config.model)
    read_stored = given.weights(stored)

    def weight(name: str) -> Tensor:
        if name in stored:
            return read_stored(name)
        grown = table[name].grown
        owner = table[name].owner
        if isinstance(grown, tuple):
            assert owner is not None
            return torch.cat([given.whole(f"{owner.path}.mixer.{key}") for key in grown])
        assert grown is not None
        return starting_value(grown, table[name].shape, phase.config.run.seed, name)

    return weight


def _differences(held: Checkpoint, model: ModelConfig) -> list[tuple[str, str]]:
    """Return the keys of the model that differ from a checkpoint's, each with a message naming both values."""
    return [
        (key, f"is {ours}, but {held.folder} holds {theirs}")
        for key, ours, theirs in _differing("model", asdict(model), asdict(held.config.model))
    ]


def _differing(key: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each key below `key` with differing values, and both values as text (`not set`, `nothing` if absent)."""
    for name in {**ours, **theirs}:
        our_value = ours.get(name)
        their_value = theirs.get(name)
        if isinstance(our_value, Mapping) and isinstance(their_value, Mapping):
            yield from _differing(f"{key}.{name}", our_value, their_value)
        elif our_value != their_value or (name in ours) != (name in theirs):
            yield (
                f"{key}.{name}",
                repr(our_value) if name in ours else "not set",
                repr(their_value) if name in theirs else "nothing",
            )


def check_fp8(plan: RunPlan) -> None:
    """Raise ConfigError if a phase needs FP8 without emulation and this process's device can't run it."""
    for phase in plan.phases:
        precision = phase.precision
        if precision.name in FP8_MULTIPLES and not precision.emulate and (fault := fp8_fault(precision.name)):
            raise ConfigError([needs(precision, f"transformer_engine and a Hopper or newer GPU ({fault})")])


def check_forced_ops(config: Config) -> None:
    """Raise ConfigError if `run.force_ops` names what this process's device can't run."""
    if problems := force_problems(config.run.force_ops, compute_device().type):
        raise ConfigError(problems)


def check_same_data(start: Checkpoint, config: Config, phase: ResolvedPhase, found: Fingerprint) -> list[Problem]:
    """Raise ConfigError if a resumed run's data has changed; `found` is the data's present fingerprint.

    A phase that is resumed in its middle needs the same data in the same order. Any other phase needs the same
    tokenizer. With `run.accept_data_changes` the differences are returned instead of raised.
    """
    stored = start.meta.data
    step = start.meta.step
    if phase.start_step < step < phase.end_step:
        keys = found
    else:
        keys = ["tokenizer"]
    accepted = config.run.accept_data_changes
    cure = "set it back, start from scratch with run.resume=never, or continue anyway with run.accept_data_changes=true"
    differences = [
        Problem(key, "changed", f"is {found[key]}, was {stored[key]} at step {step} of {phase.settings.name}")
        for key in keys
        if stored.get(key, found[key]) != found[key]
    ]
    if differences and not accepted:
        raise ConfigError([replace(problem, message=f"{problem.message}; {cure}") for problem in differences])
    return differences


def archive_superseded(start: Checkpoint | None, config: Config) -> None:
    """Rename the run's checkpoints later than its starting point, so that the next start does not resume from them."""
    run_dir = Path(config.run.dir)
    is_own = start is not None and checkpoints.belongs_to(run_dir, start.folder)
    for path in checkpoints.archive_later(run_dir, start.meta.step if start is not None and is_own else -1):
        LOG.info("run.resume=%s: a checkpoint that this run does not continue from is now %s", config.run.resume, path)


def candidates(start: Checkpoint, config: Config) -> Iterable[Checkpoint]:
    """Return the checkpoints that a run may resume from: its own from the newest on, or only the named one."""
    if config.run.resume == "auto":
        return checkpoints.valid_checkpoints(Path(config.run.dir))
    return [start]
