"""Starting point of a run or phase: a checkpoint to resume, weights of another run, or neither.

The functions `check_same_...` raise ConfigError if the configured model, optimizer or data differ from a checkpoint's
model, optimizer or data. `check_copies_learn` raises it if no phase trains the copies of a dense MLP or their router.
`check_fp8` and `check_forced_ops` raise it if this device can't run the configured kernels.
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
from hybridtron.architecture.table import Architecture
from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.manifest import BrokenCheckpoint, stored_in
from hybridtron.checkpoint.merged import merge_adapters
from hybridtron.config.checks.experts import moe_letters
from hybridtron.config.checks.precision import needs
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.saved import named_start
from hybridtron.config.schema import Config
from hybridtron.config.update_rule import update_rule
from hybridtron.config.weights import BEST, folder_of
from hybridtron.data.loader import Fingerprint
from hybridtron.device import compute_device
from hybridtron.model.init import starting_value
from hybridtron.ops.registry import force_problems
from hybridtron.parallel.control import Control
from hybridtron.parallel.transformer_engine import fp8_fault
from hybridtron.problems import ConfigError, Problem
from hybridtron.train.attention_cases import forced_problems
from hybridtron.train.upcycled import as_if_dense, frozen_problems, upcycled_layers, upcycling_lines

LOG = logging.getLogger(__name__)


def starting_point(config: Config) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None to start from scratch.

    The value of `run.resume` decides:

        never    None
        auto     the newest valid checkpoint in the run's folder; None if the folder has no checkpoints
        a path   the checkpoint at this path

    Only a checkpoint's manifest and configuration are checked here, not its tensors. Raises ConfigError if all
    checkpoints in the run's folder are broken, or if the checkpoint at the path is broken.
    """
    if config.run.resume == "never":
        return None
    if config.run.resume != "auto":
        return open_checkpoint(
            Path(config.run.resume), "run.resume", "set it to a valid checkpoint, to auto or to never"
        )
    run_dir = Path(config.run.dir)
    checkpoint = checkpoints.newest(run_dir)
    if checkpoint is None and (broken := checkpoints.all_of(run_dir)):
        cure = "start from scratch with run.resume=never, or set run.resume to another checkpoint"
        raise ConfigError(
            [Problem("run.resume", "unreadable", f"all {len(broken)} checkpoints in {run_dir} are broken: {cure}")]
        )
    return checkpoint


def shared_starting_point(config: Config, control: Control) -> Checkpoint | None:
    """Return the same as `starting_point` on all ranks. Only rank 0 lists the folder and reads manifests.

    Raises ConfigError on all ranks if rank 0 does. All ranks call this together.
    """
    opened: list[Checkpoint] = []

    def folder_and_manifest() -> list[str] | None:
        checkpoint = starting_point(config)
        if checkpoint is None:
            return None
        opened.append(checkpoint)
        return [str(checkpoint.folder), stored_in(checkpoint.folder).decode()]

    answer = control.once(folder_and_manifest)
    if answer is None:
        return None
    if opened:
        return opened[0]
    folder, stored = answer
    return Checkpoint.of_manifest(Path(folder), stored.encode())


def require_no_named_start(config: Config) -> None:
    """Raise ConfigError if the last start in the run's folder resumed from a path, so that step 0 would be wrong.

    The run has no checkpoint of its own, and `run.resume` may be `auto`.
    """
    run_dir = Path(config.run.dir)
    resume = named_start(run_dir)
    if resume is not None and config.run.resume == "auto":
        why = f"is auto, but {run_dir} was started from {resume} and has no checkpoint of its own yet"
        cure = f"repeat run.resume={resume}, or start from scratch with run.resume=never"
        raise ConfigError([Problem("run.resume", "missing", f"{why}: {cure}")])


def initial_weights(config: Config) -> Checkpoint | None:
    """Return the checkpoint that `run.weights` names, or None if the key is not set.

    If the checkpoint has adapters, the returned checkpoint's weights include them.
    """
    if config.run.weights is None:
        return None
    return merge_adapters(_named_checkpoint(config.run.weights, "run.weights"))


def _named_checkpoint(named: str, key: str) -> Checkpoint:
    """Return the checkpoint that `named`, the value of configuration key `key`, names.

        a checkpoint's folder   that checkpoint
        RUN                     the newest valid checkpoint in the run's folder RUN
        RUN@best                the checkpoint with the lowest held-out loss in the run's folder RUN

    Raises ConfigError if there is no such checkpoint.
    """
    path = Path(folder_of(named))
    cure = "set the key to a valid checkpoint, or to the folder of a run that has a valid checkpoint"
    if named.endswith(BEST):
        if (checkpoint := checkpoints.best(path)) is None:
            why = f"{path} has no checkpoint with a held-out loss, which is measured only at evaluation steps"
            raise ConfigError([Problem(key, "no-file", f"{why} (run.eval_every): set the key to another run's folder")])
        return checkpoint
    if not (path / "checkpoints").exists():
        return open_checkpoint(path, key, cure)
    checkpoint = checkpoints.newest(path)
    if checkpoint is None:
        raise ConfigError([Problem(key, "no-file", f"{path} has no valid checkpoint; {cure}")])
    return checkpoint


def open_checkpoint(path: Path, key: str, cure: str) -> Checkpoint:
    """Open a checkpoint folder.

    If the checkpoint is broken, raises ConfigError for the configuration key `key`, with `cure` as advice.
    """
    try:
        return Checkpoint.open(path)
    except BrokenCheckpoint as error:
        raise ConfigError([Problem(key, "unreadable", f"{error}; {cure}")]) from error


def weights_for(phase: ResolvedPhase) -> Checkpoint | None:
    """Return the checkpoint that a phase's `init_from` names, or None if the key is not set.

    If the checkpoint has adapters, the returned checkpoint's weights include them. Raises ConfigError if the weights
    don't fit the phase's model.
    """
    if phase.settings.init_from is None:
        return None
    key = phase.own_key("init_from")
    checkpoint = merge_adapters(_named_checkpoint(phase.settings.init_from, key))
    check_same_weights(checkpoint, phase.arch, key)
    return checkpoint


def check_same_model(start: Checkpoint, plan: RunPlan) -> None:
    """Raise ConfigError if a checkpoint has another model or optimizer than the configuration.

    `start` is the checkpoint from which the run resumes.
    """
    phase = plan.phase_ending_at(start.meta.step)
    differences = _differences(start, phase.model)
    if (stored := start.config.optim.name) != (name_now := phase.optim.name):
        key = phase.key("optim.name")
        differences.append((key, f"is {name_now}, but {start.folder} holds the state of {stored}"))
    stored_decay = start.config.run.ema
    wanted_decay = plan.config.run.ema
    if (stored_decay is None) != (wanted_decay is None):
        differences.append(
            ("run.ema", f"is {_in_yaml(wanted_decay)}, but {start.folder} was written with {_in_yaml(stored_decay)}")
        )
    if differences:
        raise ConfigError(
            [
                Problem(key, "changed", f"{message}: set the checkpoint's value, or run.resume=never to start over")
                for key, message in differences
            ]
        )


def _in_yaml(number: float | None) -> str:
    return "null" if number is None else f"{number:g}"


def check_same_weights(initial: Checkpoint, arch: Architecture, key: str, may_grow: bool = False) -> list[str]:
    """Raise ConfigError unless a model's weights have the same names and shapes as a checkpoint's weights.

    `key` is the configuration key that names the checkpoint. Returns a line for each difference that is allowed:

        - The model uses the same weights in another way. For example, it has another attention window.
        - With `may_grow`, the model has optional weights that the checkpoint lacks.
        - With `may_grow`, the model has experts where the checkpoint has dense MLPs, of which the experts are copies.

    Adapters in the checkpoint `initial` must already be merged into its weights. The model's adapters are not compared,
    since they are initialized at the phase's start.
    """
    differences = _differences(initial, replace(arch.model, adapters=None))
    stored = initial.plan.arch.base_table
    upcycled = upcycled_layers(initial.plan.arch, arch) if may_grow else []
    expected = as_if_dense(arch, upcycled).base_table
    new = {name: weight for name, weight in expected.items() if name not in stored and weight.grown is not None}
    needed = {name: weight for name, weight in expected.items() if name not in new or not may_grow}
    if problems := list(dict.fromkeys(problem for layer in upcycled for problem in layer.problems())):
        raise ConfigError(problems)
    shapes = [{name: (weight.shape, weight.parts) for name, weight in table.items()} for table in (stored, needed)]
    if shapes[0] != shapes[1]:
        cure = f"set the checkpoint's value, or name another checkpoint in {key}"
        raise ConfigError([Problem(key, "mismatch", f"{message}: {cure}") for key, message in differences])
    lines = [f"{key} {message}" for key, message in differences]
    return lines + _new_weights(new) + upcycling_lines(upcycled)


def check_copies_learn(initial: Checkpoint, plan: RunPlan) -> None:
    """Raise ConfigError if experts start as copies of MLPs, and no phase trains them, or no phase trains the router."""
    layers = upcycled_layers(initial.plan.arch, plan.phases[0].arch)
    if problems := list(frozen_problems(layers, plan)):
        raise ConfigError(problems)


def _new_weights(new: Mapping[str, Parameter]) -> list[str]:
    """Return lines about new weights: a weight's name in its sub-layer, the sub-layers, and the initial value."""
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


def weights_of(initial: Checkpoint, phase: ResolvedPhase) -> Callable[[str], Tensor]:
    """Return a function that takes a weight's name and returns the phase's full weight, from the checkpoint `initial`.

    The weight is read from its fp32 master if the checkpoint has one, and merged with its adapter without rounding.
    If the checkpoint lacks the weight, `Parameter.grown` defines its initial value. `grown` is an initializer, or it
    names other weights in the same sub-layer, whose concatenation is the initial value. Experts start as copies of the
    checkpoint's dense MLPs (`upcycled.py`).
    """
    table = phase.table
    seed = phase.config.run.seed
    stored = initial.plan.arch.table
    read_stored = initial.weights(stored, unrounded=True)
    upcycled = {layer.index: layer for layer in upcycled_layers(initial.plan.arch, phase.arch)}

    def weight(name: str) -> Tensor:
        owner = table[name].owner
        layer = upcycled.get(owner.index) if isinstance(owner, LayerOwner) else None
        if layer is not None and name.startswith(layer.prefix):
            return layer.value(name, table[name], seed, read_stored)
        if name in stored:
            return read_stored(name)
        grown = table[name].grown
        if isinstance(grown, tuple):
            assert owner is not None
            return torch.cat([initial.unrounded(f"{owner.path}.mixer.{key}") for key in grown])
        assert grown is not None
        return starting_value(grown, table[name].shape, seed, name)

    return weight


def _differences(checkpoint: Checkpoint, model: ModelConfig) -> list[tuple[str, str]]:
    """Return the keys in which model and checkpoint differ, each with a message about both values."""
    return [
        (key, f"is {configured}, but {checkpoint.folder} holds {stored}")
        for key, configured, stored in _differing("model", asdict(model), asdict(checkpoint.config.model))
    ]


def _differing(key: str, configured: Mapping[str, Any], stored: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each key below `key` whose configured and stored values differ, with both values as text.

    The text is `not set` if `configured` lacks the key, and `nothing` if `stored` lacks it.
    """
    for name in {**configured, **stored}:
        configured_value = configured.get(name)
        stored_value = stored.get(name)
        if isinstance(configured_value, Mapping) and isinstance(stored_value, Mapping):
            yield from _differing(f"{key}.{name}", configured_value, stored_value)
        elif configured_value != stored_value or (name in configured) != (name in stored):
            yield (
                f"{key}.{name}",
                repr(configured_value) if name in configured else "not set",
                repr(stored_value) if name in stored else "nothing",
            )


def changed_cuts(start: Checkpoint, plan: RunPlan) -> str | None:
    """Return a warning if an optimizer for cut matrices continues with other cuts than in the checkpoint, or None."""
    step = start.meta.step
    if step >= plan.last_step:
        return None
    stage = update_rule(plan.phase_continuing_at(step).optim).matrix_stage
    if stage is None or not stage.by_shard:
        return None
    before = start.config.parallel
    now = plan.config.parallel
    ranks = {"tensor": (before.tensor, now.tensor)}
    if moe_letters(plan.arch):
        ranks["expert_tensor"] = (before.expert_tensor_ranks, now.expert_tensor_ranks)
    for key, (was, size) in ranks.items():
        if was != size:
            return (
                f"optim.muon.blocked=true, and parallel.{key} is {size} but was {was} up to step {step}: matrices are "
                "cut into other blocks, so the run continues by another rule"
            )
    return None


def check_fp8(plan: RunPlan) -> None:
    """Raise ConfigError if a phase needs real FP8 (not emulated) and this process's device can't run it."""
    for phase in plan.phases:
        precision = phase.precision
        if precision.name in FP8_MULTIPLES and not precision.emulate and (fault := fp8_fault(precision.name)):
            raise ConfigError([needs(precision, f"transformer_engine and a Hopper or newer GPU ({fault})")])


def check_forced_ops(plan: RunPlan) -> None:
    """Raise ConfigError if `run.force_ops` names an implementation that can't run.

    An implementation can't run if this process's device lacks it, or if it can't compute the attention of a layer.
    """
    forced = plan.config.run.force_ops
    problems = force_problems(forced, compute_device().type)
    if (name := forced.get("attention")) is not None and not problems:
        problems = forced_problems(plan, name)
    if problems:
        raise ConfigError(problems)


def check_same_data(start: Checkpoint, config: Config, phase: ResolvedPhase, fingerprint: Fingerprint) -> list[Problem]:
    """Raise ConfigError if a resumed run's data differ from the data in the checkpoint `start`.

    `fingerprint` describes the present data. If the run resumes in the middle of the phase, the data, their order and
    the tokenizer must equal the checkpoint's. If it resumes at the phase's start or end, only the tokenizer must equal
    the checkpoint's. With `run.accept_data_changes` the differences are returned, and no error is raised.
    """
    stored = start.meta.data
    step = start.meta.step
    if phase.start_step < step < phase.end_step:
        keys = fingerprint
    else:
        keys = ["tokenizer"]
    accepted = config.run.accept_data_changes
    cure = "restore the data, start over with run.resume=never, or continue anyway with run.accept_data_changes=true"
    differences = [
        Problem(key, "changed", f"is {fingerprint[key]}, was {stored[key]} at step {step} of {phase.settings.name}")
        for key in keys
        if stored.get(key, fingerprint[key]) != fingerprint[key]
    ]
    if differences and not accepted:
        raise ConfigError([replace(problem, message=f"{problem.message}; {cure}") for problem in differences])
    return differences


def archive_superseded(start: Checkpoint | None, config: Config) -> None:
    """Rename the checkpoints of later steps than `start` in the run's folder, so that the next start ignores them.

    If the checkpoint `start` is not in the run's folder, or the run starts from scratch (None), all checkpoints in the
    run's folder are renamed.
    """
    run_dir = Path(config.run.dir)
    is_own = start is not None and checkpoints.belongs_to(run_dir, start.folder)
    for path in checkpoints.archive_later(run_dir, start.meta.step if start is not None and is_own else -1):
        LOG.info("run.resume=%s: a checkpoint of a later step was renamed to %s", config.run.resume, path)


def candidates(start: Checkpoint, config: Config) -> Iterable[Checkpoint]:
    """Yield the checkpoints from which a run may resume, in the order of the attempts.

    The first is `start`. With `run.resume=auto` the other valid checkpoints in the run's folder follow, newest first;
    they are opened only when they are needed.
    """
    yield start
    if config.run.resume == "auto":
        valid_checkpoints = checkpoints.valid_checkpoints(Path(config.run.dir))
        yield from (checkpoint for checkpoint in valid_checkpoints if checkpoint.folder != start.folder)
