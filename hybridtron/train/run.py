"""A run from its start to its end: what it goes on from, who takes part, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.config.choices import Export
from hybridtron.config.layout import launched
from hybridtron.config.phases import last_step, stretches
from hybridtron.config.schema import Config
from hybridtron.device import deterministic, megatron_context
from hybridtron.parallel.groups import places
from hybridtron.parallel.groups import start as start_groups
from hybridtron.parallel.groups import stop as stop_groups
from hybridtron.train.failures import Failures
from hybridtron.train.preempt import StopRequests
from hybridtron.train.run_folder import open_run_folder, outcome
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

ExportPhase = Callable[[Checkpoint, Path, Export], None]
"""Writes the end of a phase as a folder for transformers."""


def run(config: Config, requests: StopRequests, export: ExportPhase) -> None:
    """Train what the configuration asks for, from the newest checkpoint of its run folder if there is one."""
    check_fp8(config)
    start = starting_point(config)
    if start is not None and (done := start.meta.step) >= last_step(config):
        if launched().rank == 0:
            export_ended(config, export, done)
            print(
                f"{config.run.dir} has finished: {start.folder} is at step {done} of {last_step(config)}, "
                "nothing left to do.\n"
                f"To train further raise phases or run.max_steps; to start anew set run.dir=FOLDER, "
                f"or run.name=NAME for {Path(config.run.dir).parent}/NAME."
            )
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
                due = partial(export_ended, config, export)
                Trainer(config, run_dir, start, given, groups, requests, watchdog, due).fit()
        finally:
            stop_groups()


def export_ended(config: Config, export: ExportPhase, step: int) -> None:
    """Export the phases that have ended at a step, where that is asked for and not done yet."""
    run_dir = Path(config.run.dir)
    for stretch in stretches(config):
        wanted, output = stretch.phase.export, run_dir / "export" / stretch.phase.name
        if wanted is not None and stretch.last <= step and not output.exists():
            export(Checkpoint.open(checkpoints.folder_of(run_dir, stretch.last)), output, wanted)
            print(f"{stretch.phase.name} is exported: {output}")
