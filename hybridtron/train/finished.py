"""Start of a run whose training has already finished.

Such a start logs that nothing is left to train, and repeats failed exports. It compares the configuration with the
configuration in the run's last checkpoint. The effect of a changed value depends on its key:

    keys in FREE      no effect: these keys say where and how a run is started, or which exports it makes
    keys in UNUSED    a warning: these keys only observe or speed up training steps, and no step is left
    all other keys    ConfigError: the user may expect that the run is trained with the new value
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.config.load import values_by_key
from hybridtron.config.resolve import RunPlan
from hybridtron.parallel.groups import Groups
from hybridtron.problems import ConfigError, Problem
from hybridtron.train.hooks import Hook, RunContext, failures_of
from hybridtron.train.outcome import ExportsFailed, record_exports

LOG = logging.getLogger(__name__)
# Keys that may change without a warning. If `phases.N.export` has changed, this start makes the export.
FREE = re.compile(
    r"(cluster|parallel)\..*|phases\.\d+\.export"
    r"|run\.(dir|plan|resume|max_minutes|timeout|log_every|restarts|accept_data_changes|tunes|recipe|hooks.*)"
    r"|run\.verify_(state|every)"
)
# Keys that may change with a warning: profiled steps, and the choice between an op's implementations.
UNUSED = re.compile(r"run\.(profile|force_ops)(\..*)?")


def report_finished(start: Checkpoint, plan: RunPlan, hooks: Sequence[Hook], groups: Groups) -> None:
    """Let the hooks repeat their failed work, such as exports, and log that nothing is left to train.

    Raises ExportsFailed if the work of a hook fails again.
    """
    run = RunContext(plan, groups, start.meta.step, beat=lambda doing: None)
    for hook in hooks:
        hook.retry_failed(run)
    if not groups.is_first:
        return
    for key in sorted({match[1] for key in _changed(start, plan) if (match := UNUSED.fullmatch(key))}):
        LOG.warning("run.%s has no effect: no step is left to run", key)
    LOG.info(
        f"{plan.run_dir} has finished: {start.folder} is at step {start.meta.step} of {plan.last_step}, "
        "nothing left to do.\n"
        f"To train further add a phase, or raise run.max_steps; to start from scratch set run.dir=FOLDER, "
        f"or run.name=NAME for the folder {plan.run_dir.parent}/NAME."
    )
    failed = failures_of(hooks)
    record_exports(plan.run_dir, failed)
    if failed:
        raise ExportsFailed(failed)


def check_unchanged(start: Checkpoint, plan: RunPlan) -> None:
    """Raise ConfigError if a key's value has changed since `start`, the last checkpoint of a finished run.

    The values of keys in FREE and UNUSED may change.
    """
    step = start.meta.step
    problems = [
        Problem(key, "changed", f"is {configured}, but was {trained} when {plan.run_dir} was trained")
        for key, (configured, trained) in _changed(start, plan).items()
        if not FREE.fullmatch(key) and not UNUSED.fullmatch(key)
    ]
    if problems:
        why = f"names a run that has finished at step {step}, so changed keys would have no effect: change them back"
        cure = "or start a new run with run.name=NAME or run.dir=FOLDER, or from scratch here with run.resume=never"
        raise ConfigError(
            [*problems, Problem("run.dir", "changed", f"{why}, {cure}; to train further, add phases or run.max_steps")]
        )


def _changed(start: Checkpoint, plan: RunPlan) -> dict[str, tuple[str, str]]:
    """Return {key: (configured value, stored value)} for the keys whose values differ, with values as text.

    The stored values are read from the checkpoint `start`.
    """
    step = start.meta.step
    trained = values_by_key(start.config)
    configured = values_by_key(plan.phase_ending_at(step).config)
    if plan.last_step == step:  # a new value of `run.max_steps` with the same last step is ignored
        configured["run.max_steps"] = trained.get("run.max_steps")
    return {
        key: (_shown(configured, key), _shown(trained, key))
        for key in {**configured, **trained}
        if configured.get(key) != trained.get(key)
    }


def _shown(values: dict[str, Any], key: str) -> str:
    if key in values:
        return repr(values[key])
    return "not set"
