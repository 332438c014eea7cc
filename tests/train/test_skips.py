"""Refused steps and rollbacks, compared with runs assembled by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.save import Saver
from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.data.batch import Batch
from hybridtron.data.loader import Loader, build_loader
from hybridtron.device import megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.parallel import groups as process_groups
from hybridtron.train.lr import learning_rate
from hybridtron.train.rollback import Diverged
from tests.slow import slow_except
from tests.train.conftest import Train, small_run_arguments
from tests.train.faults import happening, outcome_of, spoiled, train_ranks, trained

STEPS = 12
MICRO_BATCHES = 2
SHORT = f"run.max_steps={STEPS}"
BACK = (SHORT, "optim.skips=3", "checkpoint.every=5", "run.eval_lengths=[1]")


def micro_batches(*steps: int) -> list[int]:
    """The second micro-batch of each step that is tried, counted from 1."""
    return [MICRO_BATCHES * step for step in steps]


def decisions(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "logs" / "decisions.jsonl").read_text().splitlines()]


def steps_skipped(run: Path) -> list[int]:
    return [json.loads(line)["skipped"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """Weights, moments and carried states."""
    files = [path for kind in ("model", "optimizer", "states") for path in checkpoint.glob(f"{kind}-*")]
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def final(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    return stored(checkpoints.folder_of(run, step))


def by_hand(config: Config, refused: Collection[int]) -> dict[str, Tensor]:
    """Take the same steps without trainer and guard: refused steps are computed, and their gradients discarded."""
    with megatron_context():
        engine = Engine(resolve(config)[0], process_groups.start(ParallelConfig(), launch=ProcessLaunch(0, 1)))
        phases = resolve(config)
        loader = build_loader(phases[0])
        (stretch,) = phases
        engine.start_phase(engine.phase, loader.lanes)
        carrier = engine.carrier
        for step in range(1, STEPS + 1):
            if step - 1 in refused and carrier is not None and config.states.mode == "tbtt":
                carrier.lane_states = {}  # the text between was not taken in
            engine.forward_backward(loader.micro_batches(step - 1), step - 1)
            if step in refused:
                engine.optimizer.zero_grad()
                continue
            engine.optimizer.step(learning_rate(phases, stretch.index, stretch.phase_tokens_at(step)))
            if carrier is not None:
                carrier.commit()
        blocks = {block.key: block.data.clone() for of_file in engine.blocks().values() for block in of_file}
        process_groups.stop()
    return blocks


@pytest.mark.parametrize(
    "mode", ["passing", *(pytest.param(m, marks=pytest.mark.slow) for m in ("zero", "fitted", "tbtt"))]
)
def test_refused_steps_leave_weights_and_moments_unchanged(train_small: Train, tmp_path: Path, mode: str) -> None:
    with spoiled(math.nan, micro_batches(4, 5, 9)):
        assert train_small(SHORT, f"states.mode={mode}") == 0
    run = tmp_path / "run"
    assert steps_skipped(run) == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert [(line["step"], line["what"], line["norm"], line["in_a_row"]) for line in decisions(run)] == [
        (4, "refused", None, 1), (5, "refused", None, 2), (9, "refused", None, 1),
    ]  # fmt: skip
    assert same(final(run), by_hand(Checkpoint.open(checkpoints.folder_of(run, STEPS)).config, {4, 5, 9}))


@pytest.mark.parametrize("value", slow_except([math.inf, -math.inf], math.inf))
def test_an_infinite_loss_of_one_micro_batch_refuses_the_step(train_small: Train, tmp_path: Path, value: float) -> None:
    """Gradients may be finite, as for a token that the model thinks impossible."""
    with spoiled(value, micro_batches(3)):
        assert train_small("run.max_steps=4") == 0
    assert steps_skipped(tmp_path / "run") == [0, 0, 1, 1]
    (line,) = decisions(tmp_path / "run")
    assert line["why"].startswith("the loss is ")
    assert (line["norm"] is None) == (value == math.inf)


@pytest.mark.slow
def test_steps_with_a_spiking_norm_are_refused(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridtron.engine.step_guard.WARMUP_STEPS", 4)
    with spoiled(1e6, micro_batches(8)):
        assert train_small("run.max_steps=9", "optim.spike=4", "optim.z_loss=1e-4") == 0
    (line,) = decisions(tmp_path / "run")
    assert line["step"] == 8
    assert line["norm"] > line["limit"] > 0
    with spoiled(1e6, micro_batches(8)):
        assert train_small("run.max_steps=9", "optim.spike=null", "optim.z_loss=1e-4", "run.resume=never") == 0
    assert steps_skipped(tmp_path / "run")[-1] == 0


def leaving_out(first: int, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader has no such data: a step from `first` on gets that of as many steps later as are gone."""

    def iterate(loader: Loader, start: int, stop: int) -> Iterator[list[Batch]]:
        assert start == 0
        for step in range(stop):
            yield loader.micro_batches(step if step < first else step + end - first)

    monkeypatch.setattr(Loader, "iterate", iterate)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "states.mode=passing",
        pytest.param("precision=bf16", marks=pytest.mark.slow),
        pytest.param("states.mode=fitted", marks=pytest.mark.slow),
        pytest.param("run.ema=0.8", marks=pytest.mark.slow),
    ],
)
def test_a_rollback_equals_a_run_without_the_data(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    run = tmp_path / "run"
    with spoiled(math.nan, micro_batches(7, 8, 9)):
        assert train_small(*BACK, setting) == 0
    newest = checkpoints.newest(run)
    assert newest is not None
    assert newest.meta.windows == [[0, 5, 9]]
    line = decisions(run)[-1]
    assert (line["step"], line["what"], line["to"], line["windows"]) == (9, "rolled back", 5, [[0, 5, 9]])
    assert [line["step"] for line in trained(run)] == list(range(1, STEPS + 1))
    rolled_back = final(run)
    losses = [line["loss"] for line in trained(run)]
    leaving_out(5, 9, monkeypatch)
    assert train_small(*BACK, setting, "run.resume=never") == 0
    assert same(rolled_back, final(run))
    assert [line["loss"] for line in trained(run)] == losses


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [True, False])
def test_lanes_restart_from_zero_states_after_skipped_text(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    run = tmp_path / "run"
    with spoiled(math.nan, micro_batches(7, 8, 9)):
        assert train_small(*BACK, "states.mode=tbtt") == 0
    rolled_back = final(run)
    leaving_out(5, 9, monkeypatch)
    forward_backward = Engine.forward_backward

    def cut(engine: Engine, batches: list[Batch], step: int) -> Any:
        assert engine.carrier is not None
        if restarted and step == 5:
            engine.carrier.lane_states = {}
        return forward_backward(engine, batches, step)

    monkeypatch.setattr(Engine, "forward_backward", cut)
    assert train_small(*BACK, "states.mode=tbtt", "run.resume=never") == 0
    assert same(rolled_back, final(run)) is restarted


@pytest.mark.slow
def test_runs_with_two_rollbacks_resume_identically(train_small: Train, tmp_path: Path) -> None:
    """The run rolls back to the same checkpoint twice, and is stopped while a step is refused."""
    faults = micro_batches(7, 8, 9, 11, 12, 13, 17)
    with spoiled(math.nan, faults):
        assert train_small(*BACK, "states.mode=tbtt") == 0
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    assert [line["windows"] for line in decisions(run) if line["what"] == "rolled back"] == [[[0, 5, 9]], [[0, 5, 13]]]
    run.rename(whole)
    with spoiled(math.nan, faults), happening("SIGTERM", Engine, "forward_backward", 17):  # which is step 9
        assert train_small(*BACK, "states.mode=tbtt") == 75
    newest = checkpoints.newest(run)
    assert newest is not None
    assert (newest.meta.step, newest.meta.refused, newest.meta.windows) == (9, 1, [[0, 5, 13]])
    assert train_small(*BACK, "states.mode=tbtt") == 0
    assert same(final(whole), final(run))
    assert trained(run)[9:] == trained(whole)[9:]
    metas = [json.loads((checkpoints.folder_of(r, STEPS) / "manifest.json").read_text()) for r in (whole, run)]
    assert metas[0]["content"]["meta"] == metas[1]["content"]["meta"]


@pytest.mark.slow
def test_skipped_windows_reach_over_phases(train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint between two phases can't be written: both phases leave out the windows that they had read."""
    phase = "{name: NAME, tokens: 320, seq_len: 16, global_batch: 4, lr: 1e-3, micro_batch: 2}"
    phases = f"phases=[{phase.replace('NAME', 'a')},{phase.replace('NAME', 'b')}]"
    original = Saver._seal

    def failing(saver: Saver, plan: Any, meta: Any) -> None:
        if meta.step == 5 and not list((tmp_path / "run/logs").glob("decisions.jsonl")):
            raise OSError("no space left")
        original(saver, plan, meta)

    monkeypatch.setattr(Saver, "_seal", failing)
    with spoiled(math.nan, micro_batches(6, 7)):
        assert train_small(phases, "optim.skips=2", "checkpoint.every=3") == 0
    newest = checkpoints.newest(tmp_path / "run")
    assert newest is not None
    assert newest.meta.windows == [[0, 3, 5], [1, 0, 2]]
    assert [line["phase"] for line in map(json.loads, (tmp_path / "run/metrics.jsonl").open())] == ["a"] * 5 + ["b"] * 5


@pytest.mark.slow
def test_diverging_runs_without_a_checkpoint_end_with_a_reason(train_small: Train, tmp_path: Path) -> None:
    """The folder may hold a checkpoint of an earlier run."""
    assert train_small("run.max_steps=5") == 0
    with (
        spoiled(math.nan, micro_batches(2, 3)),
        pytest.raises(Diverged),
    ):
        train_small("optim.skips=2", "run.resume=never")
    reason = outcome_of(tmp_path / "run")["reason"]
    assert "no checkpoint" in reason
    assert "2 steps in a row" in reason
    assert "step 3" in reason


def test_runs_roll_back_instead_of_finishing_on_refused_steps(train_small: Train, tmp_path: Path) -> None:
    """The run rolls back to its newest checkpoint, and ends without their data."""
    few = ("run.max_steps=6", "checkpoint.every=2", "run.eval_lengths=[1]")
    with spoiled(math.nan, micro_batches(5, 6)):
        assert train_small(few) == 0
    assert [line["what"] for line in decisions(tmp_path / "run")] == ["refused", "refused", "rolled back"]
    newest = checkpoints.newest(tmp_path / "run")
    assert newest is not None
    assert (newest.meta.step, newest.meta.windows) == (6, [[0, 4, 6]])


@pytest.mark.parametrize("steps", slow_except([1, 3], 1))
def test_runs_without_an_accepted_step_fail(train_small: Train, tmp_path: Path, steps: int) -> None:
    with spoiled(math.nan, range(1000)), pytest.raises(Diverged):
        train_small(f"run.max_steps={steps}", "run.eval_lengths=[1]")
    assert outcome_of(tmp_path / "run")["outcome"] == "failed"
    assert not checkpoints.all_of(tmp_path / "run")


def test_runs_finish_on_a_single_refused_step(train_small: Train, tmp_path: Path) -> None:
    with spoiled(math.nan, micro_batches(6)):
        assert train_small("run.max_steps=6", "run.eval_lengths=[1]") == 0
    assert outcome_of(tmp_path / "run")["outcome"] == "finished"


def test_repeated_rollbacks_end_the_run(train_small: Train, tmp_path: Path) -> None:
    with spoiled(math.nan, range(13, 1000)), pytest.raises(Diverged, match="step 5 3 times"):
        train_small(*BACK)
    run = tmp_path / "run"
    assert [line.get("times") for line in decisions(run) if line["what"] == "rolled back"] == [1, 2, 3]
    assert torch.isfinite(final(run, 5)["embedding.weight"]).all()


@pytest.mark.gloo
@pytest.mark.parametrize("value", ["nan", pytest.param("-inf", marks=pytest.mark.slow)])
def test_all_ranks_roll_back_for_a_fault_of_one(counting_folder: Path, tmp_path: Path, value: str) -> None:
    """The second of two ranks brings a loss that is not finite at steps 8 and 9, and both roll back."""
    arguments = [*small_run_arguments(counting_folder, tmp_path / "run"), "run.max_steps=10", "optim.skips=2"]
    assert train_ranks(arguments, value, "loss") == [0, 0]
    decided = decisions(tmp_path / "run")
    assert [(line["step"], line["what"]) for line in decided] == [(8, "refused"), (9, "refused"), (9, "rolled back")]
    newest = checkpoints.newest(tmp_path / "run")
    assert newest is not None
    assert (newest.meta.step, newest.meta.windows, newest.meta.accepted_steps) == (10, [[0, 5, 9]], 10)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["parallel.tensor=2"], ["parallel.pipeline=2"]], ids=["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("mode", ["passing", "tbtt"])
def test_skipped_data_of_two_ranks_is_skipped_by_one_process(
    layout: list[str], mode: str, train_small: Train, counting_folder: Path, tmp_path: Path
) -> None:
    """The run rolls back on two ranks and is resumed on one."""
    alone = tmp_path / "alone"
    ranks = tmp_path / "run"
    settings = ["optim.skips=2", "optim.eps=1e-4", f"states.mode={mode}"]
    with spoiled(math.nan, micro_batches(8, 9)):
        assert train_small(settings, SHORT, f"run.dir={alone}") == 0
    on_ranks = [*small_run_arguments(counting_folder, ranks), *settings, *layout, "run.max_steps=10"]
    assert train_ranks(on_ranks, "nan", "loss", step=16 if layout else 8) == [0, 0]
    assert [(line["step"], line["what"]) for line in decisions(ranks)][-1] == (9, "rolled back")
    assert train_small(settings, SHORT) == 0
    losses, expected = ([line["loss"] for line in trained(run)] for run in (ranks, alone))
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("asynchronous", "last"), [(False, STEPS), *(pytest.param(True, n, marks=pytest.mark.slow) for n in (STEPS, 10))]
)
def test_runs_with_infinite_moments_roll_back_before_saving(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, last: int
) -> None:
    """With an infinite second moment every later step looks valid, while its weight stands still.

    An asynchronous checkpoint reports it one step later; the last step's checkpoint reports it before the run ends.
    """
    step = Engine.step
    taken = []

    def poisoned(engine: Engine, *arguments: Any) -> tuple[float, bool]:
        taken.append(engine)
        result = step(engine, *arguments)
        if len(taken) == 9:
            optimizer = engine.blocks()["optimizer"]
            next(block for block in optimizer if block.key.startswith("exp_avg_sq")).data.fill_(math.inf)
        return result

    monkeypatch.setattr(Engine, "step", poisoned)
    assert train_small(*BACK, f"run.max_steps={last}", f"checkpoint.async={str(asynchronous).lower()}") == 0
    run = tmp_path / "run"
    assert [(line["step"], line["what"], line["to"], line["windows"]) for line in decisions(run)] == [
        (10, "rolled back", 5, [[0, 5, 10]])
    ]
    assert [line["step"] for line in trained(run)] == list(range(1, last + 1))
    assert all(tensor.isfinite().all() for tensor in final(run, last).values())
