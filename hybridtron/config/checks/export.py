"""Rules for `phases.N.export`, checked before training so that its export cannot fail for a known reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hybridtron.config.exportable import RECORD, CannotExport, export_class, transformers_fault
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config
from hybridtron.problems import Problem

_NAME = re.compile(r"\w[\w.-]*")


def export_problems(phases: Sequence[ResolvedPhase]) -> Iterator[Problem]:
    """Check that each exported phase has a class for its model and a valid folder name.

    Also check that transformers is installed, which proves the export.
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
            rule = "its export is a folder of this name: use letters, digits, dots, - and _, and no dot in front"
            yield Problem(phase.own_key("name"), "malformed", f"is {name!r}, and {rule}")
        if fault is not None:
            yield Problem(phase.own_key("export"), "not-installed", f"is {export}, but {fault}")
        if phase.arch is None:
            continue
        try:
            export_class(phase.model, export)
        except CannotExport as error:
            yield Problem(phase.own_key("export"), "unsupported", f"is {export}, but {error}")


def export_folder_problems(config: Config, phases: Sequence[ResolvedPhase]) -> Iterator[Problem]:
    """Check that an existing export folder is this run's export at the phase's last step.

    Call it only if the phases have no other problem, since it needs the step at which each phase ends.
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
            f"goes to {output} at step {step}, but what is there was not made by this run at that step: "
            "move it away, or give the phase another name",
        )


def exported_step(folder: Path) -> int | None:
    """Return the checkpoint step that a folder was exported from; None if the folder does not say."""
    with suppress(OSError, ValueError, AttributeError):
        return json.loads((folder / RECORD).read_text(encoding="utf-8")).get("step")
    return None


def newest_step(run_dir: Path) -> int:
    """Return the newest sealed checkpoint's step; 0 without one."""
    return max(sealed_checkpoints(run_dir), default=0)


def sealed_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return the run's sealed checkpoint folders by step. Their content is not verified here."""
    folders = [path.parent for path in run_dir.glob("checkpoints/step-*/manifest.json")]
    return {int(path.name[5:]): path for path in folders if path.name[5:].isdigit()}
