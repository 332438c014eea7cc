"""An export does not show which layout wrote the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridtron.config.schema import ModelConfig, ParallelConfig
from hybridtron.export.export import RECORD
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed
from tests.export.models import checkpoint_of, model_config
from tools.convert import main

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]


def write(seat: Seat, model: ModelConfig, parallel: ParallelConfig, run: Path) -> None:
    with seat.groups(parallel) as groups:
        checkpoint_of(model, groups, run, parallel=parallel, noise=False)


@pytest.mark.parametrize("name", ["granite", pytest.param("mamba", marks=pytest.mark.slow)])
def test_exports_of_two_layouts_are_the_same_files(name: str, tmp_path: Path) -> None:
    for layout, parallel in {"serial": ParallelConfig(), "cut": ParallelConfig(tensor=2, pipeline=2)}.items():
        model = model_config(name)
        if name == "mamba":
            model = replace(model, layers={"M": {"kind": "mamba", "state": 4}}, pattern="M*4")
        run, output = tmp_path / layout, tmp_path / f"{layout}-out"
        run_distributed(write, parallel.tensor * parallel.pipeline, model, parallel, run)
        arguments = ["--checkpoint", str(run), "--output", str(output), "--shard-size", "30KB", "--dtype", "float32"]
        assert main(["export", *arguments]) == 0
    left, right = (
        {path.name: path.read_bytes() for path in (tmp_path / f"{layout}-out").iterdir() if path.name != RECORD}
        for layout in ("serial", "cut")
    )
    assert len(left) > 5
    assert left == right
