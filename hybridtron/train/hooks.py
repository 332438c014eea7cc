"""Hooks: work that a run does beside its training steps, such as to evaluate, to write metrics or to export.

A hook is an object with any of the methods of `Hook`. All processes have the same hooks and call their methods at the
same points in the same order, so a method may communicate. A hook must leave weights, gradients and the random state of
training unchanged. Its attributes are not part of checkpoints: a resumed run starts with new hooks.

    on_run_start                         once, before the first step of this start
      on_phase_start                     where a phase begins or is resumed
        on_decision                      a refused step, or a rollback
        on_evaluation, then on_step      after each step, while its metrics are complete except for those of hooks
        on_checkpoint                    after a checkpoint was written
      on_phase_end                       after a phase's last step and its checkpoint
    on_run_end                           after the run's last step and its checkpoint
    close                                at the end, also after an error

`run.hooks` names classes of a user's own (`load_hooks`); docs/extending.md has an example. Code is only named there by
the configuration that a user trains with: a configuration that was stored beside weights is read without this key.
Nothing here needs torch.
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
    """A run as its hooks see it.

    plan: the configuration, its phases and the last step
    resumed_step: the last step of earlier starts; 0 for a new run
    beat: announces work to the watchdog, which allows it `run.timeout`
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
    """A point in a phase as hooks see it.

    step: the last step that was trained, counted over the run
    batches, data: the micro-batches of that step on this process, and the key of the global batch; none at a phase's
        start and end
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
        """True at the phase's last step in this run."""
        return self.step == min(self.phase.end_step, self.run.last_step)


class Hook:
    """Base class of hooks: every method does nothing."""

    def on_run_start(self, run: RunContext) -> None:
        """Prepare for a run, before the first step of this start."""

    def on_phase_start(self, context: StepContext) -> None:
        """Prepare for a phase, at its start or where it is resumed. A rollback calls it again."""

    def on_evaluation(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        """Measure the model after a step at which an evaluation is due (`run.eval_every`, and a phase's last step).

        Returns the step's metrics, with others added (`metrics.adding`).
        """
        return metrics

    def on_step(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        """Work after a step, also a refused one. Returns the step's metrics, with others added (`metrics.adding`)."""
        return metrics

    def on_decision(self, decision: Decision) -> None:
        """Record a refused step or a rollback. After a rollback, later steps are repeated."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Work after a step's checkpoint was written.

        With `checkpoint.asynchronous` this is known when the next checkpoint begins, or the phase ends.
        """

    def on_phase_end(self, context: StepContext) -> None:
        """Work after a phase's last step in this run."""

    def on_run_end(self, run: RunContext) -> None:
        """Work after the run's last step."""

    def retry_failed(self, run: RunContext) -> None:
        """Repeat work that failed in an earlier start. A finished run calls only this method."""

    def close(self) -> None:
        """Release what the hook holds, such as files; also called after an error."""

    @property
    def failed(self) -> Mapping[str, str]:
        """Reasons of work that failed on this process, by name; any makes the finished run exit with code 1."""
        return {}


def failures_of(hooks: Iterable[Hook]) -> dict[str, str]:
    """Return the reasons of all work of hooks that failed, by name."""
    return {name: reason for hook in hooks for name, reason in hook.failed.items()}


def load_hooks(entries: Sequence[Any], key: str = "run.hooks") -> tuple[list[Hook], list[Problem]]:
    """Import and make the hooks that a configuration names, and list the problems of all others.

    An entry is `MODULE.CLASS`, or `{MODULE.CLASS: {OPTION: VALUE}}` with arguments of the class by keyword. Modules are
    found where Python finds any, and in the working folder.
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
    """Import and make the hook that an entry names. Raises Unusable."""
    path, options = _parsed(entry)
    module_name, _, name = path.rpartition(".")
    with _working_folder_last():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            cure = f"put the module into {Path.cwd()} or install it, and mend it if `python -c 'import ...'` fails too"
            fault = f"names {path}, whose module can't be imported ({_reason(error)}): {cure}"
            raise Unusable(fault, code="unavailable") from error
    hook_class = getattr(module, name, None)
    if hook_class is None:
        near = did_you_mean(name, [known for known, value in vars(module).items() if _is_hook(value)])
        fault = f"names {path}, and {module_name} has no {name}{near}: name a class of that module"
        raise Unusable(fault, code="unknown-name")
    if not _is_hook(hook_class):
        cure = "derive it from hybridtron.train.hooks.Hook"
        fault = f"names {path}, which is not a hook but {type(hook_class).__name__} {name}: {cure}"
        raise Unusable(fault, code="wrong-type")
    try:
        return hook_class(**options)
    except Exception as error:
        cure = "set the options that its __init__ takes, as {MODULE.CLASS: {OPTION: VALUE}}"
        fault = f"names {path}, which can't be made with {options or 'no options'} ({_reason(error)}): {cure}"
        raise Unusable(fault, code="unsupported") from error


def _parsed(entry: Any) -> tuple[str, dict[str, Any]]:
    """Split an entry into the class's path and its options. Raises Unusable."""
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
    """Let the block import modules of the working folder; none of them replaces an installed one."""
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
