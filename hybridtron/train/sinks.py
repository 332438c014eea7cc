"""Where the numbers of a step go besides metrics.jsonl and the console: TensorBoard and wandb.

A run may be resumed or rolled back, after which it takes some steps again. TensorBoard drops what was written of them
(`purge_step`). wandb keeps its history; there the steps are an axis of their own, so that they may go back, and the
run that is resumed is the one that was begun, as its id stands in the run's folder.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hybridtron.config.load import to_plain
from hybridtron.config.schema import Config
from hybridtron.device import optional_package


class Sink(Protocol):
    """Takes every number of every step, by names such as `validation/1x`."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def roll_back(self, step: int) -> None:
        """The steps after this one are taken again."""

    def close(self) -> None: ...


def open_sinks(config: Config, run_dir: Path, resumed_step: int) -> list[Sink]:
    """TensorBoard where the package is installed, wandb where the configuration names a project."""
    sinks: list[Sink] = []
    if optional_package("tensorboard").module is not None:
        writer = optional_package("torch.utils.tensorboard").module
        if writer is not None:
            sinks.append(TensorBoard(writer, run_dir / "logs", resumed_step))
    if config.run.wandb is not None:
        sinks.append(Wandb(config, run_dir))
    return sinks


class TensorBoard:
    """Event files in logs/; those of steps that are taken again are marked as purged."""

    def __init__(self, module: Any, folder: Path, step: int) -> None:
        self._module, self._folder = module, folder
        self._writer = self._opened(step)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def roll_back(self, step: int) -> None:
        self._writer.close()
        self._writer = self._opened(step)

    def close(self) -> None:
        self._writer.close()

    def _opened(self, step: int) -> Any:
        return self._module.SummaryWriter(str(self._folder), purge_step=step + 1)


class Wandb:
    """One wandb run for all starts of a run; `config/check.py` has seen that the package is there."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        package = optional_package("wandb")
        if package.module is None:
            raise RuntimeError(f"wandb {package.reason}")
        self._run = package.module.init(
            project=config.run.wandb,
            name=config.run.name,
            dir=str(run_dir),
            id=_run_id(run_dir / "logs" / "wandb_id.txt"),
            resume="allow",
            config=to_plain(config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # wandb's own counter can't go back, and drops what does

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def roll_back(self, step: int) -> None: ...

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path) -> str:
    """The id that wandb knows the run by, made at its first start."""
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()
