"""Runs whose phases train other weights with Muon: the same losses on several processes as on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.conftest import small_run_arguments
from tests.train.test_stop_and_resume import losses, run

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
SIZES = "tokens: 256, seq_len: 16, global_batch: 4, micro_batch: 1, lr: 1e-2"  # four steps
ADAPTERS = "preset: hylora, rank: 2, alpha: 4, weights: [layers.*.mixer.kv.weight.v, layers.*.mixer.out.weight]"
ADAPTED = [
    f"phases=[{{name: base, {SIZES}}}, {{name: tune, {SIZES}, adapters: {{{ADAPTERS}}}}}, {{name: whole, {SIZES}}}]",
    "optim.name=muon",
    "optim.muon.iteration=master",
]


@pytest.mark.slow
def test_adapters_after_muon_equal_those_of_one_process(counting_folder: Path, tmp_path: Path) -> None:
    alone = [*small_run_arguments(counting_folder, tmp_path / "serial"), *ADAPTED]
    run("serial", alone)
    expected = losses(tmp_path / "serial")
    assert len(expected) == 12
    for layout in ("tp2", "dp2", "pp2"):
        settings = [*small_run_arguments(counting_folder, tmp_path / layout), *ADAPTED]
        run(layout, [*settings, "run.max_steps=6"])  # in the middle of the phase with adapters
        run(layout, settings)
        assert losses(tmp_path / layout) == pytest.approx(expected, rel=1e-4)
