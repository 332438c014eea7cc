"""A run from start to end: it joins the ranks, finds the checkpoint to start from, trains, and records its outcome."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.local import LocalCheckpoint
from hybridtron.checkpoint.local_identity import renew_identity
from hybridtron.config.load import to_yaml
from hybridtron.config.pipeline_layout import launched
from hybridtron.config.resolve import RunPlan
from hybridtron.config.saved import named_start
from hybridtron.config.schema import Config
from hybridtron.data.loader import STACKS
from hybridtron.determinism import deterministic
from hybridtron.device import megatron_context
from hybridtron.ops.dispatch import force_on_all_threads
from hybridtron.parallel.groups import Groups, node_pids
from hybridtron.parallel.groups import start as start_groups
from hybridtron.parallel.groups import stop as stop_groups
from hybridtron.problems import ConfigError, Problem
from hybridtron.train.finished import check_unchanged, report_finished
from hybridtron.train.held_out_loss import HeldOutLoss
from hybridtron.train.hooks import Hook, failures_of
from hybridtron.train.jsonl import write_whole
from hybridtron.train.local_checkpoints import is_own, newer_local_start
from hybridtron.train.logs import RunLog
from hybridtron.train.outcome import FILE, ExportsFailed, Failures, record_unfinished
from hybridtron.train.preempt import StopRequests
from hybridtron.train.refused import RefusedBatches
from hybridtron.train.router_loads import RouterLoads
from hybridtron.train.sinks import MetricsWriter
from hybridtron.train.start import (
    archive_superseded,
    changed_cuts,
    check_copies_learn,
    check_forced_ops,
    check_fp8,
    check_same_model,
    check_same_weights,
    initial_weights,
    require_no_named_start,
    shared_starting_point,
)
from hybridtron.train.supervisor.sections import START_S, Section, SectionPipe, SectionWork
from hybridtron.train.time_log import TimeLog
from hybridtron.train.trainer import Trainer
from hybridtron.train.watchdog import Watchdog

LOG = logging.getLogger(__name__)


def run_training(plan: RunPlan, requests: StopRequests, hooks: Sequence[Hook] = ()) -> None:
    """Train a run to its end, from the checkpoint or the weights that its configuration names.

    All ranks call this function. On the first rank the caller must hold the lock of the run's folder. The other ranks
    do not access the folder until all ranks have joined: then the first rank has joined too, and it holds the lock.

    `hooks` are called after the built-in hook HeldOutLoss, and before the built-in hooks RefusedBatches,
    RouterLoads and MetricsWriter. If training has already finished, hooks only repeat their failed work.
    """
    config = plan.config
    check_fp8(plan)
    check_forced_ops(plan)
    hooks = [HeldOutLoss(), *hooks, RefusedBatches(), RouterLoads(), MetricsWriter()]
    failures = Failures(plan.run_dir, launched().rank)
    pipe = SectionPipe(os.environ)
    with (
        deterministic(config.run.deterministic),
        force_on_all_threads(config.run.force_ops),
        megatron_context(),
        RunLog(failures.rank) as log,
    ):
        try:
            groups = join_ranks(config, failures, pipe)
            start = find_start(plan, groups, pipe)
            if start is not None:
                check_same_model(start, plan)
                if launched().rank == 0 and (change := changed_cuts(start, plan)) is not None:
                    LOG.warning(change)
            if start is not None and start.meta.step >= plan.last_step:
                check_unchanged(start, plan)
                pipe.announce(SectionWork(Section.export, start.meta.step, "the repeated exports"))
                report_finished(start, plan, hooks, groups)
                return
            initial = initial_weights(config) if start is None else None
            changed = changes_of_model(initial, plan)
            if groups.is_first:
                open_folder(start, initial, config, changed)
            groups.control.barrier()  # the first rank has prepared the folder, and now all ranks may write logs into it
            log.write_to(failures.run_dir)
            with Watchdog(failures, config.run.timeout, pipe) as watchdog, record_unfinished(failures):
                time_log = open_time_log(config, start, groups, failures)
                trainer = Trainer(
                    plan,
                    groups,
                    start=start,
                    initial=initial,
                    hooks=hooks,
                    requests=requests,
                    watchdog=watchdog,
                    time_log=time_log,
                )
                with closing(time_log):
                    trainer.fit()
                if failed := failures_of(hooks):
                    raise ExportsFailed(failed)
                if groups.is_first:
                    failures.record("finished")
        finally:
            stop_groups()


def changes_of_model(initial: Checkpoint | None, plan: RunPlan) -> list[str]:
    """List differences between the configured model and the model of the initial weights.

    Raises ConfigError if the weights don't fit, or if no phase trains the experts that start as copies or their router.
    """
    if initial is None:
        return []
    lines = check_same_weights(initial, plan.phases[0].arch, "run.weights", True)
    check_copies_learn(initial, plan)
    return lines


def find_start(plan: RunPlan, groups: Groups, pipe: SectionPipe) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None.

    The search is a piece of work of its own for the supervisor: it may read and fetch all of a node's local checkpoint.
    Raises ConfigError if a start from a path (`run.resume`) was interrupted before its first checkpoint, of both kinds.
    """
    if pipe.file is not None:
        signal.signal(STACKS, signal.SIG_IGN)  # a rank that has announced work must survive this signal
    pipe.announce(SectionWork(Section.start, 0, "the search for a checkpoint"))
    start = newer_local_start(shared_starting_point(plan.config, groups.control), plan, groups)
    if start is None:
        groups.control.once(lambda: require_no_named_start(plan.config))
    return start


def join_ranks(config: Config, failures: Failures, pipe: SectionPipe) -> Groups:
    """Form the process groups with all ranks. If that fails, only the first rank records the failure."""
    with ExitStack() as watched:
        if failures.rank == 0:
            watchdog = watched.enter_context(Watchdog(failures, config.run.timeout, pipe))
            watchdog.beat("all ranks joining", Section.start, START_S)
            watched.enter_context(record_unfinished(failures))
        # Collectives time out later than the watchdog, because the watchdog's report says more. Their time-out matters
        # only if the interpreter is stuck and the watchdog's thread can't run.
        groups = start_groups(config.parallel, timeout_s=max(2 * config.run.timeout, START_S))
        failures.processes = node_pids(groups.control)
        failures.started = groups.control.once(time.time)
    return groups


def open_folder(start: Checkpoint | None, initial: Checkpoint | None, config: Config, changed: Iterable[str]) -> None:
    """Log the origin of the initial weights, and prepare the run's folder for this start.

    `start` is the checkpoint from which the run resumes. `initial` is the checkpoint with the initial weights of a new
    run. `changed` has a line for each difference between the configured model and the model in `initial`.
    """
    if initial is not None:
        if initial.meta.validation is None:
            loss = ""
        else:
            loss = f", held-out loss {initial.meta.validation:.4f}"
        LOG.info("initial weights: %s%s", initial.folder, loss)
    for difference in changed:
        LOG.info("initial weights are from another configuration: %s", difference)
    open_run_folder(with_named_start(start, config))
    if config.run.resume != "auto":
        # first: if this start is killed between the two, the next one must find no local checkpoints
        renew_identity(Path(config.run.dir))
        archive_superseded(start, config)


def with_named_start(start: Checkpoint | None, config: Config) -> Config:
    """Return the configuration that the run's folder keeps.

    A run may have been started from a path (`run.resume`), and continue from a local checkpoint before it has one in
    its folder. Its configuration keeps the path: if nodes lose their disks, the next start must not begin at step 0.
    """
    named = named_start(Path(config.run.dir))
    if named is None or not isinstance(start, LocalCheckpoint) or checkpoints.all_of(Path(config.run.dir)):
        return config
    return replace(config, run=replace(config.run, resume=named))


def open_time_log(config: Config, start: Checkpoint | None, groups: Groups, failures: Failures) -> TimeLog:
    """Open the time log of a start. It continues the log of earlier starts, unless they belong to another run."""
    if config.run.resume == "never":
        continued = False
    elif start is None:
        continued = True  # an earlier start may have ended before its first checkpoint
    else:
        continued = is_own(start, failures.run_dir)
    age_s = time.monotonic() - failures.progress.began
    folder = failures.run_dir / "logs" if groups.is_first else None
    resumed = 0 if start is None else start.meta.step
    return TimeLog(folder, groups.world_size, resumed, age_s=age_s, continued=continued)


def open_run_folder(config: Config) -> None:
    """Create the run's folder, write config.yaml and delete an earlier start's outcome.json.

    Raises ConfigError if the folder can't be used.
    """
    run_dir = Path(config.run.dir)
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        write_whole(run_dir / "config.yaml", to_yaml(config))
        (run_dir / FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError([Problem("run.dir", "unreadable", f"can't be used: {error}; name another folder")]) from error
