"""What a run leaves in its folder besides checkpoints: the resolved configuration and how the run ended.

`outcome.json` is what requeue logic reads, since launchers don't hand on exit codes: `{"outcome": "finished"}`,
`{"outcome": "preempted", "step": 120, "reason": "SIGTERM"}`, or `{"outcome": "failed", "rank": 3, "reason": "..."}`.
A finished run whose exports failed lists them under `failed_exports`, by the names of their phases. A run that was
killed before it could write has none. Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hybridtron.config.load import to_yaml
from hybridtron.config.problems import ConfigError
from hybridtron.config.schema import Config
from hybridtron.train.failures import Failures, record

EXIT_PREEMPTED = 75  # train.py's exit code after a checkpoint on demand: EX_TEMPFAIL, try again


class Preempted(Exception):
    """The run was asked to stop and did so on all ranks after the same step, of which there is a checkpoint."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"preempted at step {step} ({reason}); its checkpoint is written, the same command goes on")
        self.step, self.reason = step, reason


class ExportsFailed(Exception):
    """All is trained, but the ends of some phases could not be exported."""

    def __init__(self, failed: Mapping[str, str]) -> None:
        why = "".join(f"\n  {name}: {reason}" for name, reason in failed.items())
        super().__init__(f"not exported, the same command tries again:{why}")
        self.failed = dict(failed)


def open_run_folder(config: Config) -> Path:
    """Make the run's folder, write the configuration that it runs with, and forget how it ended before."""
    run_dir = Path(config.run.dir)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    (run_dir / "outcome.json").unlink(missing_ok=True)
    return run_dir


@contextmanager
def outcome(failures: Failures) -> Iterator[None]:
    """Write outcome.json when the block ends: the first process does, of a failed run the first that failed."""
    try:
        yield
    except Preempted as end:
        if failures.rank == 0:
            record(failures.run_dir, {"outcome": "preempted", "step": end.step, "reason": end.reason})
        raise
    except ExportsFailed as end:
        record(failures.run_dir, {"outcome": "finished", "failed_exports": end.failed})
        raise
    except ConfigError as error:  # all ranks find the same, and each tells its user
        failures.report(f"ConfigError: {error}", waiting=False)
        raise
    except BaseException as error:
        if (elsewhere := failures.put_down(error)) is not None:
            raise elsewhere from None
        raise
    if failures.rank == 0:
        record(failures.run_dir, {"outcome": "finished"})


def record_exports(run_dir: Path, failed: Mapping[str, str]) -> None:
    """Update the outcome of a run that had finished before, whose exports were tried again."""
    path = run_dir / "outcome.json"
    told = json.loads(path.read_text()) if path.exists() else {"outcome": "finished"}
    if failed or "failed_exports" in told:
        told.pop("failed_exports", None)
        path.write_text(json.dumps(told | ({"failed_exports": dict(failed)} if failed else {})))
