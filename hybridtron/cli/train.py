"""usage: hybridtron train [recipe=NAME] [key=value ...]

  recipe=NAME       the model and its training; default: laptop; recipe=./mine.yaml names your own file
  run.dir=FOLDER    the run's folder; if the folder contains a run, it resumes from its newest checkpoint
  run.max_steps=N   stop after N steps
  run.plan=true     print the phases, their data and their costs, and exit; the exit code is 2 if a phase's data are
                    missing or do not fit
  run.restarts=3    start all processes again, up to three times in a row, when one of them dies or hangs
  parallel.tensor=2 shard every layer over two processes; start with torchrun --nproc-per-node 2 -m hybridtron train ...
  phases.0.lr=1e-3  any other key of the configuration can be set in the same way (see configs/README.md)

recipes: {recipes},
         recipes in configs/recipe/ablations, such as recipe=ablations/samba_421m_full_0,
         and recipes that start from a checkpoint: recipe=length/state_passing run.weights=runs/NAME

hybridtron inspect recipe=NAME prints layers, parameters, FLOPs and memory of a configuration.

Exit codes: 0 finished, 1 failed, 2 bad configuration or folder, 75 stopped by a signal or time limit after saving a
checkpoint. The code is also 1 if training finished but an export (phases.N.export) could not be written.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path

from hybridtron.cli import fast_start
from hybridtron.config.check import check, require, warnings
from hybridtron.config.load import choices_of, load
from hybridtron.config.pipeline_layout import launched
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.config.weights import lacking_weights
from hybridtron.data.check_vocabulary import vocabulary_warnings
from hybridtron.data.problems import data_problems
from hybridtron.problems import ConfigError, Problem
from hybridtron.train.hooks import load_hooks
from hybridtron.train.lock import RunLock
from hybridtron.train.outcome import EXIT_PREEMPTED, ExportsFailed, FailedElsewhere, Preempted
from hybridtron.train.phase_table import print_timetable
from hybridtron.train.preempt import StopRequests
from hybridtron.train.supervisor.supervisor import is_supervisor, supervise

EXIT_CODES: dict[type[Exception], int] = {ConfigError: 2, ExportsFailed: 1, Preempted: EXIT_PREEMPTED}


def main(arguments: list[str]) -> int:
    """Check the configuration and train, or only print the help or the plan. Returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        names = choices_of("recipe")
        recipes = ", ".join(name for name in names if "/" not in name)
        print((__doc__ or "").format(recipes=textwrap.fill(recipes, 110, subsequent_indent=" " * 9)))
        return 0
    try:
        config = load(arguments)
        if is_supervisor(config.run) and not config.run.plan:
            return supervise(config.run)
        plan = RunPlan.of(config)
        hooks, named_problems = load_hooks(config.run.hooks)
        named_problems += op_problems(config)
        if config.run.plan:
            require(plan)
            print_timetable(plan)
            if problems := named_problems + data_problems(plan):
                raise ConfigError(problems)
            return 0
        problems = check(plan, launched().world_size) + named_problems
        if problems := problems + lacking_weights(config) + data_problems(plan):
            raise ConfigError(problems)
        is_main = launched().rank == 0
        for warning in [*warnings(plan), *vocabulary_warnings(config)] if is_main else ():
            print(f"warning: {warning}", file=sys.stderr)
        requests = StopRequests(config.run, is_main=is_main)
        if is_main:
            lock = RunLock(Path(config.run.dir), lambda: bool(requests.received))
        else:
            lock = nullcontext()
        with requests, lock:
            with fast_start.uncollected():  # these modules import torch; the checks above do not
                from hybridtron.evaluate.in_training import InTraining
                from hybridtron.interop.phase_exports import PhaseExports
                from hybridtron.train.run_training import run_training

            if config.run.evaluate is not None:
                hooks.insert(0, InTraining(plan))
            run_training(plan, requests, [PhaseExports(plan), *hooks])
    except (ConfigError, ExportsFailed, Preempted) as end:
        if launched().rank == 0:
            print(end, file=sys.stderr)
        if isinstance(end, ConfigError):
            report_to_torchrun(str(end))
        return EXIT_CODES[type(end)]
    return 0


def op_problems(config: Config) -> list[Problem]:
    """List the problems of `run.force_ops`. Imports torch only if `run.force_ops` is set."""
    if not config.run.force_ops:
        return []
    from hybridtron.ops.registry import force_problems

    return force_problems(config.run.force_ops)


def report_to_torchrun(reason: str) -> None:
    """Write the reason of an exit to torchrun's error file, so that torchrun's report ends with the reason.

    torchrun prints a report of 50 lines after a failure, which scrolls the process's own messages off the screen.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": {"message": reason, "extraInfo": {"py_callstack": reason, "timestamp": int(time.time())}}}
        with suppress(OSError):  # stderr has the reason too
            Path(file).write_text(json.dumps(about))


def program(arguments: list[str]) -> int:
    """Run `main` as a program. Returns the exit code, or ends the process with code 1 after an error.

    After an error the process ends by os._exit, which works even if a thread or another rank hangs. After a preemption,
    later signals are ignored, since they could change the exit code 75.
    """
    try:
        if (code := main(arguments)) == EXIT_PREEMPTED:
            StopRequests.ignore()
        return code
    except FailedElsewhere as error:
        print(error, file=sys.stderr)
    except Exception as error:
        from hybridtron.checkpoint.manifest import BrokenCheckpoint  # imports torch; --help does not
        from hybridtron.checkpoint.save import SaveError

        # these errors need no traceback: all checkpoints are damaged, or checkpoints can't be written
        if isinstance(error, BrokenCheckpoint | SaveError):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
