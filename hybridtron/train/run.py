"""A run from start to end: it joins the ranks, finds the checkpoint to start from, trains, and records its outcome."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.config.layout import launched
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.determinism import deterministic
from hybridtron.device import megatron_context
from hybridtron.ops.dispatch import force_on_all_threads
from hybridtron.parallel.groups import Groups, barrier, host_pids
from hybridtron.parallel.groups import start as start_groups
from hybridtron.parallel.groups import stop as stop_groups
from hybridtron.train.evaluate import HeldOutLoss
from hybridtron.train.failures import Failures
from hybridtron.train.finished import check_unchanged, report_finished
from hybridtron.train.hooks import Hook, failures_of
from hybridtron.train.logs import RunLog
from hybridtron.train.preempt import StopRequests
from hybridtron.train.refused import RefusedBatches
from hybridtron.train.run_folder import ExportsFailed, open_run_folder, unfinished
from hybridtron.train.sinks import MetricsWriter
from hybridtron.train.start import (
    archive_superseded,
    check_forced_ops,
    check_fp8,
    check_same_model,
    check_same_weights,
    given_weights,
    starting_point,
)
from hybridtron.train.trainer import Trainer
from hybridtron.train.watchdog import Watchdog

LOG = logging.getLogger(__name__)
START_S = 300.0  # minimum time limit for ranks to join, however short run.timeout is


def run(plan: RunPlan, requests: StopRequests, hooks: Sequence[Hook] = ()) -> None:
    """Train a run to its end, from the newest checkpoint in its run folder if there is one.

    `hooks` run beside those that every run has: held-out losses before them, metrics after them. All ranks call this;
    on the first one the caller must hold the folder's lock. Other ranks neither read nor write the folder until all
    have joined, since another run may use it until then. A finished run only repeats work of hooks that failed.
    """
    config = plan.config
    check_fp8(plan)
    check_forced_ops(config)
    hooks = [HeldOutLoss(), *hooks, RefusedBatches(), MetricsWriter()]
    failures = Failures(plan.run_dir, launched().rank)
    with (
        deterministic(config.run.deterministic),
        force_on_all_threads(config.run.force_ops),
        megatron_context(),
        RunLog(failures.rank) as log,
    ):
        try:
            groups = join_ranks(config, failures)
            start = starting_point(config)
            if start is not None:
                check_same_model(start, plan)
            if start is not None and start.meta.step >= plan.last_step:
                check_unchanged(start, plan)
                report_finished(start, plan, hooks, groups)
                return
            if start is None:
                initial = given_weights(config)
            else:
                initial = None
            if initial is None:
                changed = []
            else:
                changed = check_same_weights(initial, plan.phases[0].model, "run.weights", True)
            if groups.is_first:
                open_folder(start, initial, config, changed)
            barrier()
            log.write_to(failures.run_dir)
            with Watchdog(failures, config.run.timeout) as watchdog, unfinished(failures):
                trainer = Trainer(
                    plan, groups, start=start, initial=initial, hooks=hooks, requests=requests, watchdog=watchdog
                )
                trainer.fit()
                if failed := failures_of(hooks):
                    raise ExportsFailed(failed)
                if groups.is_first:
                    failures.record("finished")
        finally:
            stop_groups()


def join_ranks(config: Config, failures: Failures) -> Groups:
    """Start the process groups with all ranks. Only the first rank records a failure of this in the run's folder."""
    with ExitStack() as watched:
        if failures.rank == 0:
            watchdog = watched.enter_context(Watchdog(failures, config.run.timeout))
            watchdog.beat("all ranks joining", START_S)
            watched.enter_context(unfinished(failures))
        # the watchdog acts first and reports more; the time-out of collectives covers a stuck interpreter
        groups = start_groups(config.parallel, timeout_s=max(2 * config.run.timeout, START_S))
        failures.places = host_pids()
    return groups


def open_folder(start: Checkpoint | None, given: Checkpoint | None, config: Config, changed: Iterable[str]) -> None:
    """Log where weights come from and prepare the run's folder for this start.

    `changed` describes how the model differs from the checkpoint `given` that its weights come from.
    """
    if given is not None:
        if given.meta.validation is None:
            loss = ""
        else:
            loss = f", held-out loss {given.meta.validation:.4f}"
        LOG.info("weights of %s%s", given.folder, loss)
    for difference in changed:
        LOG.info("weights of another use: %s", difference)
    open_run_folder(config)
    if config.run.resume != "auto":
        archive_superseded(start, config)
