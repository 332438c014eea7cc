"""Rules for `phases.N.export`, checked before training, so that exports do not fail after training.

A phase with `export` is exported at its end to RUN/export/NAME, in Hugging Face's format. NAME is the phase's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hybridtron.config.export_class import RECORD, CannotExport, export_class, transformers_fault
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config
from hybridtron.problems import Problem

_NAME = re.compile(r"\w[\w.-]*")


def export_problems(phases: Sequence[ResolvedPhase]) -> Iterator[Problem]:
    """List problems with exported phases: an invalid folder name, no class for the model, or no package transformers.

    The package transformers is needed, because an export is checked by loading it with transformers.
    """
    if any(phase.settings.export is not None for phase in phases):
        fault = transformers_fault()
    else:
        fault = None
    for phase in phases:
        name = phase.settings.name
        export = phase.settings.export
        if export is None:
            continue
        if not _NAME.fullmatch(name):
            rule = (
                "which names the folder of the export: use letters, digits, dots, - and _, and no dot at the beginning"
            )
            yield Problem(phase.own_key("name"), "malformed", f"is {name!r}, {rule}")
        if fault is not None:
            yield Problem(phase.own_key("export"), "not-installed", f"is {export}, but {fault}")
        if phase.parsed is None:
            continue
        try:
            export_class(phase.parsed, export)
        except CannotExport as error:
            yield Problem(phase.own_key("export"), "unsupported", f"is {export}, but {error}")


def export_folder_problems(config: Config, phases: Sequence[ResolvedPhase]) -> Iterator[Problem]:
    """Report export folders that already exist, unless they are this run's exports of the same steps.

    The phases must have no other problems, since their last steps are computed here.
    """
    run_dir = Path(config.run.dir)
    if config.run.resume == "never":
        reached = -1
    else:
        reached = newest_step(run_dir)
    for phase in phases:
        output = run_dir / "export" / phase.settings.name
        step = phase.end_step
        if phase.settings.export is None or not output.exists() or reached >= step == exported_step(output):
            continue
        yield Problem(
            phase.own_key("export"),
            "exists",
            f"writes {output} at step {step}, but this folder exists and is not this run's export of that step: "
            "move the folder, or give the phase another name",
        )


def exported_step(folder: Path) -> int | None:
    """Return the step of the checkpoint from which a folder was exported; None if the folder has no record of it."""
    with suppress(OSError, ValueError, AttributeError):
        return json.loads((folder / RECORD).read_text(encoding="utf-8")).get("step")
    return None


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest sealed checkpoint; 0 if there is none."""
    return max(sealed_checkpoints(run_dir), default=0)


def sealed_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return step -> folder for the run's sealed checkpoints.

    A sealed checkpoint was written completely: its folder has a manifest. The folder's content is not verified.
    """
    folders = [path.parent for path in run_dir.glob("checkpoints/step-*/manifest.json")]
    return {int(path.name[5:]): path for path in folders if path.name[5:].isdigit()}
