"""An export does not show which layout wrote the checkpoint, and brings back every tensor of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.cli.convert import main
from hybridtron.config.export_class import RECORD
from hybridtron.config.schema import ParallelConfig
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed
from tests.interop.models import CUSTOM, MODELS, checkpoint_of, model_config

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]
LAYOUTS = {"serial": ParallelConfig(), "cut": ParallelConfig(tensor=2, pipeline=2)}


def write(seat: Seat, names: Sequence[str], layout: str, folder: Path) -> None:
    """The serial weights are far from where they start; those of the other layout are the same."""
    with seat.groups(LAYOUTS[layout]) as groups:
        for name in names:
            weights = None
            if layout != "serial":
                weights = Checkpoint.open(folder_of(folder / name / "serial", 1))
            run = folder / name / layout
            checkpoint_of(model_config(name), groups, run, parallel=LAYOUTS[layout], weights=weights)


@pytest.mark.parametrize("names", [("samba",), pytest.param((*MODELS, *CUSTOM), marks=pytest.mark.slow)], ids=len)
def test_exports_of_two_layouts_are_equal_and_complete(names: Sequence[str], tmp_path: Path) -> None:
    for layout, parallel in LAYOUTS.items():
        run_distributed(write, parallel.tensor * parallel.pipeline, names, layout, tmp_path, timeout_s=200)
    for name in names:
        files = []
        for layout in LAYOUTS:
            output = tmp_path / name / f"{layout}-out"
            asked = ["--output", str(output), "--shard-size", "30KB", "--dtype", "float32", "--verify", "none"]
            assert main(["export", "--checkpoint", str(tmp_path / name / layout), *asked]) == 0
            files.append({p.name: p.read_bytes() for p in output.iterdir() if p.name not in (RECORD, "README.md")})
        assert len(files[0]) > 4
        assert files[0] == files[1], name
        back = tmp_path / name / "back"
        assert main(["import", "--input", str(tmp_path / name / "cut-out"), "--output", str(back)]) == 0
        ours = Checkpoint.open(folder_of(tmp_path / name / "cut", 1))
        theirs = Checkpoint.open(back)
        assert [key for key in theirs.shapes if not torch.equal(theirs.whole(key), ours.whole(key))] == [], name
        assert {key for key in ours.shapes if not key.startswith(("exp_avg", "random"))} == set(theirs.shapes)
