"""Phases with other optimizers, and phases that train other weights with Muon."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hybridtron.cli import train
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.config.update_rule import unread_by_phases
from tests.train.conftest import Refused, Train, small_run_arguments
from tests.train.faults import spoiled
from tests.train.test_phases import tensors
from tests.train.test_stop_and_resume import losses, run

pytestmark = pytest.mark.timeout(240)
SIZES = "tokens: 256, seq_len: 16, global_batch: 4, micro_batch: 1, lr: 1e-2"  # four steps
ADAPTERS = "preset: hylora, rank: 2, alpha: 4, weights: [layers.*.mixer.kv.weight.v, layers.*.mixer.out.weight]"
ADAPTED = [
    f"phases=[{{name: base, {SIZES}}}, {{name: tune, {SIZES}, adapters: {{{ADAPTERS}}}}}, {{name: whole, {SIZES}}}]",
    "optim.name=muon",
    "optim.muon.iteration=master",
]
TO_MUON = f"{{name: turned, {SIZES}, optim: {{name: muon, muon: {{steps: 4}}}}}}"
THERE_AND_BACK = [
    f"phases=[{{name: adam, {SIZES}}}, {TO_MUON}, {{name: back, {SIZES}}}]",
    "optim.muon.iteration=master",
    "checkpoint.every=1",
    "checkpoint.keep=20",
]


def assert_same_on_layouts(data: Path, folder: Path, settings: list[str], layouts: tuple[str, ...]) -> None:
    run("serial", [*small_run_arguments(data, folder / "serial"), *settings])
    expected = losses(folder / "serial")
    assert len(expected) == 12
    for layout in layouts:
        arguments = [*small_run_arguments(data, folder / layout), *settings]
        run(layout, [*arguments, "run.max_steps=6"])  # in the middle of the second phase
        run(layout, arguments)
        assert losses(folder / layout) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.gloo
def test_adapters_after_muon_equal_those_of_one_process(counting_folder: Path, tmp_path: Path) -> None:
    assert_same_on_layouts(counting_folder, tmp_path, ADAPTED, ("tp2", "pp2"))


@pytest.mark.slow
@pytest.mark.gloo
def test_a_change_of_the_optimizer_is_the_same_on_several_processes(counting_folder: Path, tmp_path: Path) -> None:
    assert_same_on_layouts(counting_folder, tmp_path, THERE_AND_BACK, ("tp2", "dp2"))


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def whole(request: pytest.FixtureRequest, counting_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run AdamW, Muon and AdamW without a stop."""
    folder = tmp_path_factory.mktemp("turned") / "run"
    arguments = small_run_arguments(counting_folder, folder)
    assert train.main([*arguments, *THERE_AND_BACK, f"precision={request.param}"]) == 0
    return folder


def precision_of(folder: Path) -> str:
    if any(key.startswith("master.") for key in tensors(folder, 4)):
        return "precision=bf16"
    return "precision=fp32"


@pytest.mark.slow
def test_a_stop_in_a_phase_or_at_its_start_changes_no_bits(whole: Path, train_small: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for step in (2, 4, 6, 8, 9, 12):
        assert train_small(*THERE_AND_BACK, precision_of(whole), f"run.max_steps={step}") == 0
    assert losses(folder) == losses(whole)
    for step in (6, 12):
        actual = tensors(folder, step)
        expected = tensors(whole, step)
        assert actual.keys() == expected.keys()
        assert [key for key in actual if not torch.equal(actual[key], expected[key])] == []


@pytest.mark.slow
def test_the_state_starts_at_zero_and_the_masters_are_kept(whole: Path, train_small: Train, tmp_path: Path) -> None:
    """A phase without any learning rate changes no master; a step of Muon or AdamW gives its first moments."""
    still = SIZES.replace("lr: 1e-2", "lr: 1e-30")
    one_step = THERE_AND_BACK[0].replace(TO_MUON, TO_MUON.replace(SIZES, still).replace("256", "64"))
    settings = [*THERE_AND_BACK, one_step, "optim.muon.nesterov=false", precision_of(whole)]
    assert train_small(*settings, "run.max_steps=6") == 0
    folder = tmp_path / "run"
    before = tensors(folder, 4)
    after = tensors(folder, 5)
    back = tensors(folder, 6)
    masters = {key for key in before if key.startswith(("master.", "layers.", "embedding.", "norm."))}
    assert masters == {key for key in after if key.startswith(("master.", "layers.", "embedding.", "norm."))}
    assert [key for key in masters if not torch.equal(before[key], after[key])] == []
    matrix = "layers.0.mixer.out_proj.weight"
    assert f"exp_avg_sq.{matrix}" in before
    assert f"exp_avg_sq.{matrix}" not in after
    for at in (after, back):  # m = (1 - beta_1) g and v = (1 - beta_2) g^2 after the first step
        key = "embedding.weight"
        mean = at[f"exp_avg.{key}"].float()
        torch.testing.assert_close(at[f"exp_avg_sq.{key}"].float(), 0.05 * (mean / 0.1).square(), rtol=1e-4, atol=1e-12)
    mean = back[f"exp_avg.{matrix}"]
    torch.testing.assert_close(back[f"exp_avg_sq.{matrix}"], 0.05 * (mean / 0.1).square(), rtol=1e-4, atol=1e-12)


def test_the_plan_names_the_optimizer_of_a_phase(train_small: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_small(*THERE_AND_BACK, "run.plan=true") == 0
    output = capsys.readouterr().out
    for words in (
        "starts with the state of muon at zero, without the moments of adamw",
        "starts with the state of adamw at zero, without the moments of muon",
        "optim.name: adamw -> muon",
        "steps=5",
        "steps=4",
    ):
        assert words in output, words


def unread(*settings: str) -> dict[str, str]:
    first = f"{{name: first, {SIZES}}}"
    plan = RunPlan.of(load(["recipe=laptop", f"phases=[{first}, {TO_MUON}]", *settings]))
    return {problem.key: problem.message for problem in unread_by_phases(plan.phases)}


def test_an_option_of_an_optimizer_that_no_phase_uses_is_refused() -> None:
    assert unread() == unread("optim.muon.steps=3") == unread("phases.0.optim.name=muon", "optim.muon.steps=3") == {}
    assert set(unread("phases.0.optim.muon.steps=3")) == {"phases.0.optim.muon.steps"}
    assert set(unread("optim.muon.steps=3", "phases.0.optim.muon.steps=5")) == {"phases.0.optim.muon.steps"}
    (message,) = unread("phases.1.optim.name=adamw").values()
    assert "use phases.1.optim.name=muon" in message, "optim.name=muon would change the other phase"
    assert set(unread("phases.1.optim.name=adamw", "optim.muon.scale=spectral")) == {
        "phases.1.optim.muon.steps",
        "optim.muon.scale",
    }


@pytest.mark.slow
def test_another_optimizer_in_the_middle_of_a_phase_is_refused(train_small: Train, refused: Refused) -> None:
    assert train_small(*THERE_AND_BACK, "run.max_steps=6") == 0
    other = ["phases.1.optim.name=adamw", "phases.1.optim.muon.steps=null", "phases.2.optim.name=muon"]
    problem = refused(*THERE_AND_BACK, *other)
    assert problem["phases.1.optim.name"].code == "changed"
    assert train_small(*THERE_AND_BACK, "run.max_steps=9", "phases.2.optim.name=muon") == 0


@pytest.mark.slow
def test_a_rollback_over_the_change_restores_the_optimizer_before(train_small: Train, tmp_path: Path) -> None:
    """The last step of AdamW and three of Muon are refused. A rollback skips checkpoints of refused steps."""
    refused_steps = [4, 5, 6, 7]
    with spoiled(math.nan, [4 * step for step in refused_steps]):
        assert train_small(*THERE_AND_BACK, "optim.skips=3") == 0
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "logs" / "decisions.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["what"] == "refused"] == refused_steps
    (back,) = [line for line in lines if line["what"] != "refused"]
    assert (back["step"], back["to"]) == (7, 3)
    matrix = "exp_avg_sq.layers.0.mixer.out_proj.weight"
    assert [step for step in (3, 4, 5, 8, 9, 12) if matrix in tensors(folder, step)] == [3, 4, 9, 12]
