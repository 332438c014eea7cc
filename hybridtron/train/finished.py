"""Start of a run that is already trained to its end.

Such a start reports that nothing is left to train, and retries failed exports. It refuses changed keys, which would
have no effect.
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
from hybridtron.train.outcome import record_exports
from hybridtron.train.run_folder import ExportsFailed

LOG = logging.getLogger(__name__)
# Keys that may change: how and where a run is started, and exports, which are still made.
FREE = re.compile(
    r"(cluster|parallel)\..*|phases\.\d+\.export"
    r"|run\.(dir|plan|resume|max_minutes|timeout|log_every|accept_data_changes|tunes|hooks.*)"
)


def report_finished(start: Checkpoint, plan: RunPlan, hooks: Sequence[Hook], groups: Groups) -> None:
    """Repeat failed work of hooks, then log that nothing is left to train. Raises ExportsFailed."""
    run = RunContext(plan, groups, start.meta.step, beat=lambda doing: None)
    for hook in hooks:
        hook.retry_failed(run)
    if not groups.is_first:
        return
    LOG.info(
        f"{plan.run_dir} has finished: {start.folder} is at step {start.meta.step} of {plan.last_step}, "
        "nothing left to do.\n"
        f"To train further raise phases or run.max_steps; to start from scratch set run.dir=FOLDER, "
        f"or run.name=NAME for {plan.run_dir.parent}/NAME."
    )
    failed = failures_of(hooks)
    record_exports(plan.run_dir, failed)
    if failed:
        raise ExportsFailed(failed)


def check_unchanged(start: Checkpoint, plan: RunPlan) -> None:
    """Raise ConfigError if a finished run is started with keys that differ from its checkpoint and would do nothing."""
    step = start.meta.step
    trained = values_by_key(start.config)
    configured = values_by_key(plan.phase_ending_at(step).config)
    if plan.last_step == step:
        configured["run.max_steps"] = trained.get("run.max_steps")
    problems = [
        Problem(
            key,
            "changed",
            f"is {_shown(configured, key)}, and was {_shown(trained, key)} when {plan.run_dir} was trained",
        )
        for key in {**configured, **trained}
        if configured.get(key) != trained.get(key) and not FREE.fullmatch(key)
    ]
    if problems:
        why = f"has finished at step {step}, so that nothing would be done with these keys: leave them as they were"
        cure = "a run of its own is run.name=NAME or run.dir=FOLDER, one from scratch here run.resume=never"
        raise ConfigError(
            [*problems, Problem("run.dir", "changed", f"{why}; {cure}; phases or run.max_steps train further")]
        )


def _shown(values: dict[str, Any], key: str) -> str:
    if key in values:
        return repr(values[key])
    return "not set"
