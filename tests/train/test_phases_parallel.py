"""Runs of several phases on several processes: the same losses as on one, also where a stage has nothing to learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.conftest import small_run_arguments
from tests.train.test_stop_and_resume import losses, run

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
SIZES = "seq_len: 16, global_batch: 4, micro_batch: 1"
CHAIN = (
    f"phases=[{{name: grow, tokens: 192, {SIZES}, lr: 1e-2, ramp: {{start: 2, step: 2, tokens: 64}}}},"
    f"{{name: late, tokens: 192, {SIZES}, lr_piece: carry_on, train: ['layers.[67].*', 'norm.*'],"
    "layers: {W: {window: 4}}},"
    f"{{name: all, tokens: 192, {SIZES}, lr: 1e-2, states: {{mode: passing}}}}]"
)


@pytest.fixture(scope="module")
def serial(counting_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("serial") / "run"
    run("serial", [*small_run_arguments(counting_folder, folder), CHAIN])
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "tp2-sp", "dp2"])
def test_phases_on_a_layout_equal_those_of_one_process(
    layout: str, serial: list[float], counting_folder: Path, tmp_path: Path
) -> None:
    arguments = [*small_run_arguments(counting_folder, tmp_path / "run"), CHAIN]
    run(layout, [*arguments, "run.max_steps=6"])  # in the middle of the phase that trains a part
    run(layout, arguments)
    assert losses(tmp_path / "run") == pytest.approx(serial, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("pp2", "serial"), ("serial", "tp2-pp2"), ("dp2", "tp2")])
def test_partially_trained_phases_continue_on_another_layout(
    first: str, then: str, serial: list[float], counting_folder: Path, tmp_path: Path
) -> None:
    arguments = [*small_run_arguments(counting_folder, tmp_path / "run"), CHAIN]
    run(first, [*arguments, "run.max_steps=6"])
    run(then, arguments)
    assert losses(tmp_path / "run") == pytest.approx(serial, rel=1e-4)
