"""A run from its start to its end: what it goes on from, who takes part, and how it ends."""

from __future__ import annotations

from pathlib import Path

from hybridtron.config.layout import launched
from hybridtron.config.phases import last_step
from hybridtron.config.schema import Config
from hybridtron.device import deterministic, megatron_context
from hybridtron.parallel.groups import places
from hybridtron.parallel.groups import start as start_groups
from hybridtron.parallel.groups import stop as stop_groups
from hybridtron.train.failures import Failures
from hybridtron.train.phase_exports import ExportPhase, PhaseExports
from hybridtron.train.preempt import StopRequests
from hybridtron.train.run_folder import ExportsFailed, open_run_folder, outcome, record_exports
from hybridtron.train.start import (
    check_fp8,
    check_same_model,
    check_same_weights,
    given_weights,
    leave_others,
    starting_point,
)
from hybridtron.train.trainer import Trainer
from hybridtron.train.watchdog import Watchdog

START_S = 300.0  # that ranks may take to find each other, however short run.timeout is


def run(config: Config, requests: StopRequests, export: ExportPhase) -> None:
    """Train what the configuration asks for, from the newest checkpoint of its run folder if there is one."""
    check_fp8(config)
    exports = PhaseExports(config, export)
    start = starting_point(config)
    if start is not None and (done := start.meta.step) >= last_step(config):
        if launched().rank == 0:
            exports.write(done)
            print(
                f"{config.run.dir} has finished: {start.folder} is at step {done} of {last_step(config)}, "
                "nothing left to do.\n"
                f"To train further raise phases or run.max_steps; to start anew set run.dir=FOLDER, "
                f"or run.name=NAME for {Path(config.run.dir).parent}/NAME."
            )
            record_exports(Path(config.run.dir), exports.failed)
            if exports.failed:
                raise ExportsFailed(exports.failed)
        return
    if start is not None:
        check_same_model(start, config)
    given = given_weights(config) if start is None else None
    changed = [] if given is None else check_same_weights(given, config.in_phase(config.phases[0]), "run.weights")
    run_dir = Path(config.run.dir)
    if launched().rank == 0:
        for difference in changed:
            print(f"weights of another use: {difference}")
        open_run_folder(config)
        if config.run.resume != "auto":
            leave_others(start, config)
    failures = Failures(run_dir, launched().rank)
    with Watchdog(failures, config.run.timeout) as watchdog, deterministic(config.run.deterministic):
        try:
            with megatron_context(), outcome(failures):
                watchdog.beat("the meeting of all ranks", START_S)
                # the watchdog comes first and tells more; an operation's own time-out is there for a stuck interpreter
                groups = start_groups(config.parallel, timeout_s=max(2 * config.run.timeout, START_S))
                failures.meet(places())
                Trainer(config, run_dir, start, given, groups, requests, watchdog, exports).fit()
                if exports.failed:
                    raise ExportsFailed(exports.failed)
        finally:
            stop_groups()
