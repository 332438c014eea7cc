"""A run's folder: its creation with the resolved configuration, and the outcome of a run that does not finish.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hybridtron.config.load import to_yaml
from hybridtron.config.schema import Config
from hybridtron.problems import ConfigError, Problem
from hybridtron.train.failures import Failures
from hybridtron.train.outcome import FILE

EXIT_PREEMPTED = 75  # exit code of a preempted run: EX_TEMPFAIL of sysexits.h, try again


class Preempted(Exception):
    """Raised on all ranks after the same step when a run was asked to stop and has written its checkpoint."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"preempted at step {step} ({reason}); its checkpoint is written, the same command continues")
        self.step = step
        self.reason = reason


class ExportsFailed(Exception):
    """Raised when training is complete but exports, or other work after a phase, failed; `failed` has the reasons."""

    def __init__(self, failed: Mapping[str, str]) -> None:
        why = "".join(f"\n  {name}: {reason}" for name, reason in failed.items())
        super().__init__(f"not exported, the same command retries:{why}")
        self.failed = dict(failed)


def open_run_folder(config: Config) -> Path:
    """Create the run's folder, write config.yaml and delete an earlier outcome.json. Raises ConfigError."""
    run_dir = Path(config.run.dir)
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(config))
        (run_dir / FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError([Problem("run.dir", "unreadable", f"can't be used: {error}; name a folder")]) from error
    return run_dir


@contextmanager
def unfinished(failures: Failures) -> Iterator[None]:
    """Write outcome.json if the block raises. The exception is raised again.

    The first rank records a preemption; of several ranks that fail, the first to fail records it.
    """
    try:
        yield
    except Preempted as end:
        if failures.rank == 0:
            failures.record("preempted", end.reason)
        raise
    except ExportsFailed as end:
        failures.record("finished", failed_exports=end.failed)
        raise
    except ConfigError as error:  # every rank raises the same one, so none waits for another to report
        failures.report(f"ConfigError: {error}", waiting=False)
        raise
    except BaseException as error:
        if (elsewhere := failures.record_error(error)) is not None:
            raise elsewhere from None
        raise
