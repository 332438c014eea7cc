"""The rules of `phases.N.export`: that the end of a phase can be exported is known before its beginning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hybridtron.config.exportable import RECORD, CannotExport, export_class, transformers_fault
from hybridtron.config.phases import stretches
from hybridtron.config.schema import Config
from hybridtron.problems import ConfigError, Problem

_NAME = re.compile(r"\w[\w.-]*")


def export_problems(config: Config) -> Iterator[Problem]:
    """A class for the model as it is in each phase, transformers to prove it with, and a name for its folder."""
    fault = transformers_fault() if any(phase.export is not None for phase in config.phases) else None
    for index, phase in enumerate(config.phases):
        if phase.export is None:
            continue
        where = f"phases.{index}"
        if not _NAME.fullmatch(phase.name):
            rule = "its export is a folder of this name: use letters, digits, dots, - and _, and no dot in front"
            yield Problem(f"{where}.name", f"is {phase.name!r}, and {rule}")
        if fault is not None:
            yield Problem(f"{where}.export", f"is {phase.export}, but {fault}")
        try:
            export_class(config.in_phase(phase).model, phase.export)
        except CannotExport as error:
            yield Problem(f"{where}.export", f"is {phase.export}, but {error}")
        except ConfigError:
            continue  # reported by the model's own rules


def export_folder_problems(config: Config) -> Iterator[Problem]:
    """What is in an export's place already must be the export of that step, by this run.

    For phases that nothing else is wrong with, since it must be known where they end.
    """
    run_dir = Path(config.run.dir)
    reached = -1 if config.run.resume == "never" else _newest_step(run_dir)
    for stretch in stretches(config):
        output = run_dir / "export" / stretch.phase.name
        if stretch.phase.export is None or not output.exists() or reached >= stretch.last == exported_step(output):
            continue
        cure = "move it away, or give the phase another name"
        yield Problem(
            f"phases.{stretch.index}.export",
            f"goes to {output} at step {stretch.last}, but what is there was not made by this run at that step: {cure}",
        )


def exported_step(folder: Path) -> int | None:
    """The step of the checkpoint that a folder was exported from; None where it does not say."""
    with suppress(OSError, ValueError, AttributeError):
        return json.loads((folder / RECORD).read_text(encoding="utf-8")).get("step")
    return None


def _newest_step(run_dir: Path) -> int:
    names = (path.parent.name.removeprefix("step-") for path in run_dir.glob("checkpoints/step-*/manifest.json"))
    return max((int(name) for name in names if name.isdigit()), default=-1)
