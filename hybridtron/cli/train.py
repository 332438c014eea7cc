"""usage: hybridtron train [recipe=NAME] [key=value ...]

  recipe=NAME       the model and its training; default: laptop. recipe=./mine.yaml is a file of your own
  run.dir=FOLDER    the run's folder; a run found there resumes from its newest checkpoint
  run.max_steps=N   stop early
  run.plan=true     print the phases, their data and their costs, and exit; with code 2 if data of a phase is missing
                    or does not fit
  parallel.tensor=2 cut every layer over two processes; torchrun --nproc-per-node 2 -m hybridtron train ... starts them
  phases.0.lr=1e-3  or any other key of the configuration (see configs/README.md)

recipes: {recipes},
         and those in configs/recipe/ablations, such as recipe=ablations/samba_421m_full_0,
         and in configs/recipe/length, from a checkpoint: recipe=length/state_passing run.weights=runs/NAME

Layers, parameters, FLOPs and memory of a configuration: hybridtron inspect recipe=NAME

Exit codes: 0 finished, 2 bad configuration or folder, 75 stopped on demand after a checkpoint, 1 any other failure,
such as a complete training whose export (phases.N.export) could not be written.
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

from hybridtron.cli import lean_imports
from hybridtron.config.check import check, require, warnings
from hybridtron.config.layout import launched
from hybridtron.config.load import choices_of, load
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.config.weights import lacking_weights
from hybridtron.data.check_vocabulary import vocabulary_warnings
from hybridtron.data.problems import data_problems
from hybridtron.problems import ConfigError, Problem
from hybridtron.train.failures import FailedElsewhere
from hybridtron.train.hooks import load_hooks
from hybridtron.train.lock import RunLock
from hybridtron.train.phase_table import print_timetable
from hybridtron.train.preempt import StopRequests
from hybridtron.train.run_folder import EXIT_PREEMPTED, ExportsFailed, Preempted

EXIT_CODES: dict[type[Exception], int] = {ConfigError: 2, ExportsFailed: 1, Preempted: EXIT_PREEMPTED}


def main(arguments: list[str]) -> int:
    """Check the configuration and train, or print help or the plan. Returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        names = choices_of("recipe")
        recipes = ", ".join(name for name in names if "/" not in name)
        print((__doc__ or "").format(recipes=textwrap.fill(recipes, 110, subsequent_indent=" " * 9)))
        return 0
    try:
        config = load(arguments)
        plan = RunPlan.of(config)
        hooks, named_problems = load_hooks(config.run.hooks)
        named_problems += op_problems(config)
        if config.run.plan:
            require(config)
            print_timetable(plan)
            if problems := named_problems + data_problems(plan):
                raise ConfigError(problems)
            return 0
        problems = check(config, launched().world_size) + named_problems
        if problems := problems + lacking_weights(config) + data_problems(plan):
            raise ConfigError(problems)
        first = launched().rank == 0
        for warning in [*warnings(plan), *vocabulary_warnings(config)] if first else ():
            print(f"warning: {warning}", file=sys.stderr)
        requests = StopRequests(config.run, is_main=first)
        if first:
            lock = RunLock(Path(config.run.dir), lambda: bool(requests.received))
        else:
            lock = nullcontext()
        with requests, lock:
            with lean_imports.uncollected():  # imports torch, which the checks do without
                from hybridtron.evaluate.in_training import InTraining
                from hybridtron.interop.phase_exports import PhaseExports
                from hybridtron.train.run import run

            if config.run.evaluate is not None:
                hooks.insert(0, InTraining(plan))
            run(plan, requests, [PhaseExports(plan), *hooks])
    except (ConfigError, ExportsFailed, Preempted) as end:
        if launched().rank == 0:
            print(end, file=sys.stderr)
        if isinstance(end, ConfigError):
            report_to_torchrun(str(end))
        return EXIT_CODES[type(end)]
    return 0


def op_problems(config: Config) -> list[Problem]:
    """List the problems of `run.force_ops`. Imports torch only if it is set."""
    if not config.run.force_ops:
        return []
    from hybridtron.ops.registry import force_problems

    return force_problems(config.run.force_ops)


def report_to_torchrun(reason: str) -> None:
    """Write the reason to torchrun's error file, so that its own report of 50 lines ends with the reason.

    The report can't be shortened, and it scrolls away the messages that the process has printed before.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": {"message": reason, "extraInfo": {"py_callstack": reason, "timestamp": int(time.time())}}}
        with suppress(OSError):  # stderr has the reason too
            Path(file).write_text(json.dumps(about))


def program(arguments: list[str]) -> int:
    """Run `main` as a program. Returns the exit code, or ends the process with code 1 after an unexpected error.

    os._exit ends a failed rank even if a thread or a peer hangs. Late signals are ignored, so that code 75 stands.
    """
    try:
        if (code := main(arguments)) == EXIT_PREEMPTED:
            StopRequests.ignore()
        return code
    except FailedElsewhere as error:
        print(error, file=sys.stderr)
    except Exception as error:
        from hybridtron.checkpoint.manifest import BrokenCheckpoint  # imports torch, which --help does without
        from hybridtron.checkpoint.save import SaveError

        # every checkpoint of the run is damaged, or none can be written: the message is enough
        if isinstance(error, BrokenCheckpoint | SaveError):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
