"""Local checkpoints of a run: whether a start resumes from one, and when steps are saved locally."""

from __future__ import annotations

import logging
from collections import Counter
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.local import LocalCheckpoint, folder_of_node
from hybridtron.checkpoint.local_identity import Identity, identity_for, limit_stored, stored_identity
from hybridtron.checkpoint.local_restore import newest_local
from hybridtron.checkpoint.local_save import LocalWriter
from hybridtron.checkpoint.save import layout_of
from hybridtron.config.pipeline_layout import with_overlap
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.schema import Config
from hybridtron.config.units import parse_steps
from hybridtron.parallel.control import Control, form_again, node_name
from hybridtron.parallel.groups import Groups
from hybridtron.problems import ConfigError, Problem
from hybridtron.train.supervisor.sections import START_S

LOG = logging.getLogger(__name__)


def is_own(start: Checkpoint | None, run_dir: Path) -> bool:
    """Return True if a checkpoint is one of this run: in its folder, or on the nodes' own disks."""
    if start is None:
        return False
    return isinstance(start, LocalCheckpoint) or checkpoints.belongs_to(run_dir, start.folder)


def newer_local_start(shared: Checkpoint | None, plan: RunPlan, groups: Groups) -> Checkpoint | None:
    """Return the newest local checkpoint if it is newer than `shared`, which is in the run's folder; else `shared`.

    All ranks call this together, and each gets the part of its node.
    """
    config = plan.config
    if config.checkpoint.local_dir is None:
        return shared
    check_host_names(groups.control)
    if config.run.resume != "auto":
        return shared
    stored = groups.control.once(lambda: _values(stored_identity(Path(config.run.dir))))
    if stored is None:
        return shared
    identity = Identity.of(stored)
    step = 0 if shared is None else shared.meta.step
    boundaries = {phase.start_step for phase in plan.phases}

    def allowed(local_step: int) -> bool:
        return step < local_step < plan.last_step and local_step not in boundaries

    folder = folder_of_node(config, identity.text)
    local = newest_local(folder, groups.control, layout_of_parts(config, groups), identity, allowed)
    if local is None:
        return shared
    if groups.is_first:
        LOG.info("resuming from the local checkpoint of step %s", local.meta.step)
    return local


def check_host_names(control: Control) -> None:
    """Raise ConfigError if two nodes have the same host name, by which local checkpoints know their node.

    All ranks call this together.
    """
    names = control.all_gather(node_name())
    hosts = [names[ranks[0]] for ranks in control.nodes]
    repeated = [name for name, count in Counter(hosts).items() if count > 1]
    if repeated:
        why = f"needs a host name of its own on each node, but {hosts.count(repeated[0])} nodes are named {repeated[0]}"
        cure = "give each machine another host name (hostnamectl hostname NAME), or set checkpoint.local_dir=null"
        raise ConfigError([Problem("checkpoint.local_dir", "conflict", f"{why}: {cure}")])


def layout_of_parts(config: Config, groups: Groups) -> str:
    """Describe the division of tensors among ranks as text.

    Besides the layout, these are the ranks that divide experts, and all that moves the borders of optimizer shards.
    """
    parallel = with_overlap(config.parallel, groups.dense.copies.size)
    experts = f"expert {parallel.expert}, expert_tensor {parallel.expert_tensor_ranks}"
    shards = f"distributed_optimizer {parallel.distributed_optimizer}, overlap {parallel.overlap_grad_reduce}"
    return f"{layout_of(config, groups)}, {experts}, {shards}, gradients {config.precision.gradients}"


def local_writer(config: Config, groups: Groups) -> LocalWriter | None:
    """Return the writer for local checkpoints, or None without `checkpoint.local_dir`. All ranks call this together."""
    if config.checkpoint.local_dir is None:
        return None
    identity = Identity.of(groups.control.once(lambda: identity_for(Path(config.run.dir)).values()))
    background = form_again(groups.control, timedelta(seconds=max(2 * config.run.timeout, START_S)))
    folder = folder_of_node(config, identity.text)
    run_dir = Path(config.run.dir)
    return LocalWriter(
        folder, groups.control, background, layout_of_parts(config, groups), run_dir=run_dir, identity=identity
    )


def reject_after(step: int, local: LocalWriter | None, control: Control, run_dir: Path) -> None:
    """Let no start use local checkpoints of steps after `step`. All ranks call this together.

    local: writes local checkpoints; without it, those of earlier starts are only marked, and not removed
    """
    if local is not None:
        local.reject_after(step)
    else:
        control.once(lambda: limit_stored(run_dir, step))


def _values(identity: Identity | None) -> dict[str, Any] | None:
    return None if identity is None else identity.values()


class SavePlace(Enum):
    """Place of a checkpoint: the run's folder, or the nodes' own disks."""

    shared = "shared"
    local = "local"


class SaveTimes:
    """Decision after each step of a phase whether a checkpoint is written, and where."""

    def __init__(self, config: Config, phase: ResolvedPhase) -> None:
        tokens = phase.settings.tokens_per_step
        self.every = parse_steps(config.checkpoint.every, tokens)
        self.local_every: int | None = None
        if config.checkpoint.local_dir is not None:
            self.local_every = parse_steps(config.checkpoint.local_every, tokens)
        self._due = False
        self._due_locally = False

    def after(self, step: int, refused: bool, at_once: bool) -> SavePlace | None:
        """Return the place of the checkpoint after a step, or None. `at_once` asks for one in the run's folder.

        A checkpoint that is due after a refused step is written after the next accepted step, because a run never rolls
        back to a checkpoint that was written right after a refused step.
        """
        self._due |= step % self.every == 0
        self._due_locally |= self.local_every is not None and step % self.local_every == 0
        if at_once or (self._due and not refused):
            self._due = False
            self._due_locally = False
            return SavePlace.shared
        if self._due_locally and not refused:
            self._due_locally = False
            return SavePlace.local
        return None
