"""Hooks: work that a run does in addition to its training steps, such as evaluating, writing metrics and exporting.

A hook is an instance of a class derived from `Hook`. All processes have the same hooks, and call the hooks' methods at
the same points in the same order, so a method may use collectives. A hook must leave weights, gradients and the random
state of training unchanged.

A run may be started several times: it is interrupted, and another start resumes it from a checkpoint. Each start
creates new hooks. Checkpoints do not store the attributes of hooks.

A refused step is a step whose update was discarded because its loss or gradients were abnormal. The methods are called
at these points:

    on_run_start                         once, before the first step of this start
      on_phase_start                     where a phase begins or is resumed
        on_decision                      at a refused step, and when the run rolls back to an earlier checkpoint
        on_evaluation                    after a step at which an evaluation is due
        on_step                          after each step, and after its evaluation if there is one
        on_checkpoint                    after a checkpoint was written
      on_phase_end                       after a phase's last step and its checkpoint
    on_run_end                           after the run's last step and its checkpoint
    close                                at the end, also after an error

`on_evaluation` and `on_step` receive the step's metrics and return them, possibly with numbers added.

The configuration key `run.hooks` names a user's own classes, which `load_hooks` imports; docs/extending.md has an
example. When the configuration in a checkpoint is read, this key is ignored: the checkpoint may come from somebody
else, and importing a class runs code. Importing this module does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtron.config.schema import Config
from hybridtron.problems import Problem, Unusable, did_you_mean
from hybridtron.train.metrics import Decision, StepMetrics

if TYPE_CHECKING:
    from hybridtron.config.resolve import ResolvedPhase, RunPlan
    from hybridtron.data.batch import Batch
    from hybridtron.data.loader import Loader
    from hybridtron.engine.engine import Engine
    from hybridtron.parallel.groups import Groups
    from hybridtron.train.skipped_data import BatchKey


@dataclass(frozen=True)
class RunContext:
    """Information about a run for its hooks.

    plan: the configuration, its phases and the last step
    groups: the process groups of this rank
    resumed_step: the step of the checkpoint that this start continues from; 0 if the run starts from scratch
    beat: function that reports the start of new work to the watchdog; its argument describes the work. The watchdog
        ends the process unless another call follows within `run.timeout` seconds
    """

    plan: RunPlan
    groups: Groups
    resumed_step: int
    beat: Callable[[str], None]

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def run_dir(self) -> Path:
        return self.plan.run_dir

    @property
    def last_step(self) -> int:
        return self.plan.last_step


@dataclass(frozen=True)
class StepContext:
    """Information about a point in a phase for hooks.

    step: the last step that was trained; the run's first step is 1
    batches: the micro-batches of that step on this process; empty at a phase's start and end
    data: the phase's index, and the index of that step's global batch in the phase's data; None at a phase's start and
        end
    """

    run: RunContext
    phase: ResolvedPhase
    engine: Engine
    loader: Loader
    step: int
    batches: Sequence[Batch] = ()
    data: BatchKey | None = None

    @property
    def ends_phase(self) -> bool:
        """True at the phase's last step, or at the run's last step if the run ends within the phase."""
        return self.step == min(self.phase.end_step, self.run.last_step)


class Hook:
    """Base class of hooks: every method does nothing."""

    def on_run_start(self, run: RunContext) -> None:
        """Prepare for a run, before the first step of this start."""

    def on_phase_start(self, context: StepContext) -> None:
        """Prepare for a phase, at its start or where the run resumes within it; called again after a rollback."""

    def on_evaluation(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        """Measure the model after an evaluation step: a step that `run.eval_every` selects, or a phase's last step.

        Returns the step's metrics. `metrics.adding` adds a hook's numbers to the metrics.
        """
        return metrics

    def on_step(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        """Work after every step, also after a refused step.

        Returns the step's metrics. `metrics.adding` adds a hook's numbers to the metrics.
        """
        return metrics

    def on_decision(self, decision: Decision) -> None:
        """Record a refused step or a rollback.

        After a rollback `decision.to` is not None, and the steps after `decision.to` are trained again.
        """

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Work after the checkpoint of `step` was written to `folder`.

        With `checkpoint.asynchronous` the checkpoint is written while training continues. Then this method is called
        later: when the next checkpoint begins, or when the phase ends.
        """

    def on_phase_end(self, context: StepContext) -> None:
        """Work after a phase's last step, or after the run's last step if the run ends within the phase."""

    def on_run_end(self, run: RunContext) -> None:
        """Work after the run's last step."""

    def retry_failed(self, run: RunContext) -> None:
        """Repeat work that failed in an earlier start of the run.

        This method is called instead of all others if training had already finished when the run was started.
        """

    def close(self) -> None:
        """Release the hook's resources, such as files; also called after an error."""

    @property
    def failed(self) -> Mapping[str, str]:
        """Failed work of this hook on this process: name of the work (such as a phase's name) -> reason.

        If any work has failed when training is finished, the process exits with code 1.
        """
        return {}


def failures_of(hooks: Iterable[Hook]) -> dict[str, str]:
    """Return the `failed` reasons of all these hooks in one dictionary."""
    return {name: reason for hook in hooks for name, reason in hook.failed.items()}


def load_hooks(entries: Sequence[Any], key: str = "run.hooks") -> tuple[list[Hook], list[Problem]]:
    """Import and create the hooks that a configuration names; return them, and a problem for each invalid entry.

    An entry is `MODULE.CLASS`, or `{MODULE.CLASS: {OPTION: VALUE}}` with keyword arguments for the class. Modules are
    searched on Python's import path, and then in the working folder.
    """
    hooks: list[Hook] = []
    problems: list[Problem] = []
    for number, entry in enumerate(entries):
        try:
            hooks.append(_hook_of(entry))
        except Unusable as fault:
            problems.append(Problem(f"{key}.{number}", fault.code, str(fault)))
    return hooks, problems


def _hook_of(entry: Any) -> Hook:
    """Import and create the hook that an entry names. Raises Unusable if this fails."""
    path, options = _parsed(entry)
    module_name, _, name = path.rpartition(".")
    with _working_folder_last():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            cure = f"put the module into {Path.cwd()} or install it, and check that Python can import the module"
            fault = f"names {path}, whose module can't be imported ({_reason(error)}): {cure}"
            raise Unusable(fault, code="unavailable") from error
    hook_class = getattr(module, name, None)
    if hook_class is None:
        near = did_you_mean(name, [known for known, value in vars(module).items() if _is_hook(value)])
        fault = f"names {path}, but {module_name} has no {name}{near}: name a class of that module"
        raise Unusable(fault, code="unknown-name")
    if not _is_hook(hook_class):
        cure = "name a class that is derived from hybridtron.train.hooks.Hook"
        fault = f"names {path}, which is not a hook but {type(hook_class).__name__} {name}: {cure}"
        raise Unusable(fault, code="wrong-type")
    try:
        return hook_class(**options)
    except Exception as error:
        cure = "set the options that the class's __init__ takes, as {MODULE.CLASS: {OPTION: VALUE}}"
        fault = f"names {path}, which can't be created with {options or 'no options'} ({_reason(error)}): {cure}"
        raise Unusable(fault, code="unsupported") from error


def _parsed(entry: Any) -> tuple[str, dict[str, Any]]:
    """Split an entry into the class's path and the options. Raises Unusable if the entry names no class."""
    path = entry
    options: Any = {}
    if isinstance(entry, dict) and len(entry) == 1:
        [(path, options)] = entry.items()
    are_options = options is None or (isinstance(options, dict) and all(isinstance(name, str) for name in options))
    is_path = isinstance(path, str) and path.count(".") > 0 and all(part.isidentifier() for part in path.split("."))
    if not is_path or not are_options:
        cure = "write MODULE.CLASS, or {MODULE.CLASS: {OPTION: VALUE}} with options"
        raise Unusable(f"is {entry!r}, which names no class: {cure}", code="malformed")
    return path, dict(options or {})


def _is_hook(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Hook)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def _working_folder_last() -> Iterator[None]:
    """Let the block import modules from the working folder.

    The folder is searched last, so that its modules do not replace installed modules of the same name.
    """
    folder = str(Path.cwd())
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
