"""What a run leaves in its folder besides checkpoints: the resolved configuration and how the run ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridtron.config.load import to_yaml
from hybridtron.config.schema import Config


def open_run_folder(config: Config) -> Path:
    """Make the run's folder and write the configuration that it runs with."""
    run_dir = Path(config.run.dir)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    return run_dir


@contextmanager
def outcome(run_dir: Path, writes: bool) -> Iterator[None]:
    """Write outcome.json when the block ends: finished, or failed with the reason. One process writes it."""
    path = run_dir / "outcome.json"
    if writes:
        path.unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        if writes:
            path.write_text(json.dumps({"outcome": "failed", "reason": f"{type(error).__name__}: {error}"}))
        raise
    if writes:
        path.write_text(json.dumps({"outcome": "finished"}))
