"""The end of a phase as a folder for transformers, written by a run itself as `phases.N.export` asks."""

from __future__ import annotations

import sys
from pathlib import Path

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.config.choices import Export as Wanted
from hybridtron.interop.export import ExportPlan, export, target_of
from hybridtron.interop.sample import verify_sample

SHARD_BYTES = 5 * 10**9


def export_phase(source: Checkpoint, output: Path, wanted: Wanted) -> None:
    """Write it and prove it on the first and the last layer of every kind; what is there already stays."""
    target = target_of(source.config.model, wanted)

    def prove(folder: Path) -> None:
        verify_sample(folder, source, target)

    for warning in export(output, ExportPlan(source, target, None, SHARD_BYTES), prove, lambda done, of: None):
        print(f"warning: {output}: {warning}", file=sys.stderr)
