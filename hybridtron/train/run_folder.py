"""What a run leaves in its folder besides checkpoints: the resolved configuration and how the run ended.

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

EXIT_PREEMPTED = 75  # train.py's exit code after a checkpoint on demand: EX_TEMPFAIL, try again


class Preempted(Exception):
    """The run was asked to stop and did so on all ranks after the same step, of which there is a checkpoint."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"preempted at step {step} ({reason}); its checkpoint is written, the same command continues")
        self.step, self.reason = step, reason


class ExportsFailed(Exception):
    """All is trained, but work after some phases failed, such as their exports."""

    def __init__(self, failed: Mapping[str, str]) -> None:
        why = "".join(f"\n  {name}: {reason}" for name, reason in failed.items())
        super().__init__(f"not exported, the same command retries:{why}")
        self.failed = dict(failed)


def open_run_folder(config: Config) -> Path:
    """Make the run's folder, write the configuration that it runs with, and forget how it ended before."""
    run_dir = Path(config.run.dir)
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(config))
        (run_dir / FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError([Problem("run.dir", f"can't be used: {error}; name a folder")]) from error
    return run_dir


@contextmanager
def unfinished(failures: Failures) -> Iterator[None]:
    """Write outcome.json if the block does not come to its end: of a failed run, the first process that failed does."""
    try:
        yield
    except Preempted as end:
        if failures.rank == 0:
            failures.record("preempted", end.reason)
        raise
    except ExportsFailed as end:
        failures.record("finished", failed_exports=end.failed)
        raise
    except ConfigError as error:  # all ranks find the same, and each reports it
        failures.report(f"ConfigError: {error}", waiting=False)
        raise
    except BaseException as error:
        if (elsewhere := failures.record_error(error)) is not None:
            raise elsewhere from None
        raise
