"""Flipped bits and wrong gradients on one rank: found within the stated steps, named, and trained again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli import train
from hybridtron.config.export_class import RECORD
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, Documents, ParallelConfig, RunConfig
from hybridtron.engine import schedule
from hybridtron.engine.corruption import GRADIENTS, WEIGHTS, digests_of
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from hybridtron.parallel.rendezvous import Rendezvous
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Layout, small, small_model
from hybridtron.train.corruption import FILE, CheckFailed, CorruptionWatch, Suspects, suspects_of
from hybridtron.train.outcome import CorruptRank
from hybridtron.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.slow import slow_except
from tests.train.conftest import small_run_arguments
from tests.train.faults import outcome_of

RANK = 1  # the rank at fault
STEPS = 7  # of an engine
FAULT_STEP = 4  # the fault comes before this step


def flip(tensor: Tensor, bit: int = 3, index: int = 0) -> None:
    """Flip a bit of an element."""
    words = tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    words[index] = words[index] ^ torch.tensor(1).bitwise_left_shift(torch.tensor(bit)).to(words.dtype)


def flip_state(kind: str, engine: Engine) -> None:
    """Flip a bit of a master or moment, in the largest shard of the rank."""
    tensors = [shard.tensor(kind) for shard in engine.optimizer.shards.values()]
    flip(max((tensor for tensor in tensors if tensor is not None), key=Tensor.numel))


def flip_weight(owned: bool, engine: Engine) -> None:
    """Flip a bit of a weight that this rank updates, or that another rank does."""
    shards = engine.optimizer.shards.values()
    shard = next(shard for shard in shards if owned == (shard.stop > shard.start))
    flip(shard.weight, index=shard.start)


def compute_wrongly(engine: Engine) -> None:
    """From now on all gradients of this rank are too large by a part in a hundred."""
    loss_of = schedule._loss_of

    def wrong(*arguments: Any, **options: Any) -> Any:
        total, tokens, report = loss_of(*arguments, **options)
        return total * 1.01, tokens, report

    schedule._loss_of = wrong


FAULTS: dict[str, Callable[[Engine], None]] = {
    "exp_avg": partial(flip_state, "exp_avg"),
    "exp_avg_sq": partial(flip_state, "exp_avg_sq"),
    "master": partial(flip_state, "master"),
    "own weight": partial(flip_weight, True),
    "weight": partial(flip_weight, False),
    "gradient": compute_wrongly,
}


class Found(NamedTuple):
    """Failure that a rank reports: kind, step, rank, and newest usable step; and digests of the rank's weights."""

    fault: tuple[str, int, int, int] | None
    digests: list[int]


def configured(layout: Layout, distributed: bool = True) -> Config:
    pattern = "M-W-" if layout.expert == 1 else "M-We"
    config = small(
        small_model(pattern, tied=True, heads={}), layout.on(ParallelConfig()), Documents.isolate, layout.data
    )
    return replace(config, parallel=replace(config.parallel, distributed_optimizer=distributed))


def watched(
    seat: Seat, config: Config, folder: Path, cases: Sequence[tuple[str | None, int | None, int | None]]
) -> list[Found]:
    """Train an engine in bf16 for each case: a fault, `run.verify_state` and `run.verify_every`."""
    results = []
    # with a pipeline, on the last stage, which alone computes the loss
    at_fault = seat.world_size - 1 if config.parallel.pipeline > 1 else RANK
    loss_of = schedule._loss_of
    with seat.groups(config.parallel) as groups:
        for fault, state, every in cases:
            schedule._loss_of = loss_of
            engine = Engine(resolve(config)[0], groups, dtype=torch.bfloat16)
            batches = micro_batches(engine.phase)
            share = len(batches) // groups.data.size
            watch = CorruptionWatch(RunConfig(verify_state=state, verify_every=every), groups, folder)
            watch.start_from(0)
            saver: Any = SimpleNamespace(step=0)
            found = None
            try:
                for step in range(1, STEPS + 1):
                    comes = step == FAULT_STEP and fault is not None and seat.rank == at_fault
                    if comes and fault != "weight":
                        FAULTS[fault](engine)
                    own = batches[groups.data.rank * share :][:share]
                    watch.begin_step(engine, step, step - 1, own)
                    engine.forward_backward(own, step - 1)
                    if comes and fault == "weight":  # earlier, the owner's elements would be gathered
                        FAULTS[fault](engine)
                    engine.step(1e-2)
                    watch.end_step(engine, step, saver)
            except CheckFailed as error:
                found = (error.kind, error.step, error.rank, error.newest)
            results.append(Found(found, digests_of(list(engine.checks.weights.values())).tolist()))
    return results


RUN_STEPS = 10
STATE = ("run.verify_state=1",)
ALL = (*STATE, "run.verify_every=2", "run.deterministic=true")


def rank_of_run(seat: Seat, place: dict[str, str], arguments: list[str], fault: str | None, step: int) -> str | int:
    """Train, with a fault before an update of one rank; return the exit code, or the error of a corrupt rank."""
    os.environ.update(place, RANK=str(seat.rank), WORLD_SIZE=str(seat.world_size))
    update = Engine.step
    updates = []

    def faulty(self: Engine, *arguments: Any) -> Any:
        updates.append(1)
        if fault is not None and seat.rank == RANK and len(updates) == step:
            FAULTS[fault](self)
        return update(self, *arguments)

    Engine.step = faulty
    try:
        return train.main(arguments)
    except CorruptRank as error:
        return str(error)


class Ranks:
    """Runs of a tiny model in bf16 on several ranks."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data = data
        self.folder = folder

    def train(self, name: str, ranks: int, *settings: str, fault: str | None = None, step: int = 7) -> list[str | int]:
        """Train ten steps, with a checkpoint after each second; return exit codes or errors by rank."""
        arguments = [
            *small_run_arguments(self.data, self.folder / name), "precision=bf16", "model.pattern=M-W-",
            f"run.max_steps={RUN_STEPS}", "run.eval_lengths=[1]", "checkpoint.every=2", "checkpoint.keep=2",
            "phases.0.micro_batch=1", "phases.0.global_batch=6", "phases.0.tokens=9600", "states.mode=passing",
            *settings,
        ]  # fmt: skip
        rendezvous = Rendezvous()  # its store closes with the object
        return run_distributed(rank_of_run, ranks, rendezvous.variables, arguments, fault, step, timeout_s=200)

    def last(self, name: str) -> dict[str, Tensor]:
        """Return all tensors of the last checkpoint: weights, moments, carried states, random states."""
        folder = checkpoints.folder_of(self.folder / name, RUN_STEPS)
        tensors = {}
        for path in folder.glob("*.safetensors"):
            tensors |= load_file(path)
        return tensors

    def suspect(self, name: str) -> set[str]:
        return {path.name for path in (self.folder / name / "checkpoints").glob("suspect-*")}

    def decisions(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / name / "logs" / "decisions.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def ranks(counting_folder: Path, tmp_path: Path) -> Ranks:
    return Ranks(counting_folder, tmp_path)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name, tensor in left.items() if not torch.equal(tensor, right[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_sees_each_flipped_bit(dtype: torch.dtype) -> None:
    tensor = torch.randn(1001).to(dtype)
    (before,) = digests_of([tensor]).tolist()
    for bit in range(8 * tensor.element_size()):
        flip(tensor, bit, 500)
        assert digests_of([tensor]).tolist() != [before], bit
        flip(tensor, bit, 500)
    assert digests_of([tensor, tensor[:0]]).tolist() == [before, 0]


def test_a_digest_is_the_sum_of_words() -> None:
    words = torch.full((70000,), -(2**31), dtype=torch.int32)
    words[0] = 5
    total = (int(words.long().sum()) + 2**31) % 2**32 - 2**31
    halves = words.view(torch.int16)
    short = (int(halves.long().sum()) + 2**15) % 2**16 - 2**15
    assert digests_of([words.view(torch.float32), words.view(torch.bfloat16)]).tolist() == [total, short]


def test_majority_names_a_rank() -> None:
    assert suspects_of([{"w": 1}, {"w": 2}, {"w": 1}]) == Suspects([1], [])
    assert suspects_of([{"w": 1}, {"w": 2}]) == Suspects([], [0, 1])
    assert suspects_of([{"a": 1}, {"b": 7}, {"a": 2}, {"b": 7}, {"a": 2}, {"b": 8}]) == Suspects([0, 5], [])
    assert suspects_of([{"w": 1}, {"w": 2}, {"w": 3}]) == Suspects([], [0, 1, 2])
    assert suspects_of([{}, {}]) == Suspects([], [])


def test_a_node_is_named_only_if_no_other_may_be_at_fault() -> None:
    nodes = [0, 0, 1, 2]
    assert Suspects([1], []).rank(nodes) == 1
    assert Suspects([0, 1], []).rank(nodes) == 0
    assert Suspects([1, 2], []).rank(nodes) == -1
    assert Suspects([1], [2, 3]).rank(nodes) == -1
    assert Suspects([], [2, 3]).rank(nodes) == -1


def watch_of(run_dir: Path, groups: Groups, verified: int, *steps: int) -> CorruptionWatch:
    """Return a watch of a run that has checkpoints of these steps, and a verified step."""
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / FILE).write_text(json.dumps({WEIGHTS: verified}))
    for step in steps:
        checkpoints.folder_of(run_dir, step).mkdir(parents=True)
    return CorruptionWatch(RunConfig(verify_state=100), groups, run_dir)


def test_suspect_checkpoints_are_renamed_even_if_none_is_left(
    tmp_path: Path, alone: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watch_of(tmp_path, alone, 9, 10, 20)
    watch.archive_suspects(CheckFailed(WEIGHTS, 21, "weights differ", rank=-1, newest=9), None)
    assert checkpoints.all_of(tmp_path) == []
    assert "no checkpoint up to step 9 is left" in caplog.text


def test_exports_of_suspect_checkpoints_are_renamed(tmp_path: Path, alone: Groups) -> None:
    """So the phase's end is exported again, and a restart is not refused because of the folder."""
    watch = watch_of(tmp_path, alone, 9, 8, 10)
    exports = tmp_path / "export"
    for name, step in (("early", 8), ("late", 10), ("suspect-older", 10)):
        (exports / name).mkdir(parents=True)
        (exports / name / RECORD).write_text(json.dumps({"step": step}))
    watch.archive_suspects(CheckFailed(WEIGHTS, 12, "weights differ", rank=-1, newest=9), None)
    assert {path.name for path in exports.iterdir()} == {"early", "suspect-late", "suspect-older"}


def test_verified_checkpoint_is_kept_from_the_first_step_of_a_start(tmp_path: Path, alone: Groups) -> None:
    watch = watch_of(tmp_path, alone, 30, 30, 35)
    watch.start_from(35)
    saver: Any = SimpleNamespace(step=0, verified=frozenset())
    engine: Any = SimpleNamespace(checks=SimpleNamespace(counts={WEIGHTS: 0}))
    watch.end_step(engine, 36, saver)  # this check can't fail, so it verifies nothing
    assert saver.verified == {30}


def test_newest_checkpoint_that_each_kind_has_verified_is_kept(tmp_path: Path, alone: Groups) -> None:
    watch = CorruptionWatch(RunConfig(verify_state=100, verify_every=1000), alone, tmp_path)
    watch.start_from(0)
    for step in (190, 200, 210):
        checkpoints.folder_of(tmp_path, step).mkdir(parents=True)
    saver: Any = SimpleNamespace(step=200, verified=frozenset())
    engine: Any = SimpleNamespace(checks=SimpleNamespace(counts={WEIGHTS: 0}))
    watch.end_step(engine, 201, saver)
    assert checkpoints.newest_up_to(tmp_path, saver.verified) == {checkpoints.folder_of(tmp_path, 200)}


def test_phase_that_starts_from_a_checkpoint_does_not_verify_it(
    tmp_path: Path, alone: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_of(tmp_path, alone, 0)
    watch.start_from(0)
    engines = SimpleNamespace(needs_rebuild=lambda phase: True)
    trainer: Any = SimpleNamespace(
        corruption=watch, engines=engines, watchdog=Mock(), saver=Mock(), run_dir=tmp_path,
        reached_by_training=lambda phase: True, restored=lambda candidates: None,
    )  # fmt: skip
    monkeypatch.setattr(Checkpoint, "open", lambda folder: None)
    phase: Any = SimpleNamespace(start_step=50, settings=SimpleNamespace(name="second"))
    Trainer.load_phase_start(trainer, phase)
    saver: Any = SimpleNamespace(step=50, verified=frozenset())
    engine: Any = SimpleNamespace(checks=SimpleNamespace(counts={WEIGHTS: 0}))
    watch.end_step(engine, 51, saver)
    assert watch.verified == {WEIGHTS: 0}
    watch.end_step(engine, 52, saver)
    assert watch.verified == {WEIGHTS: 51}


def test_rollback_lowers_the_verified_step_of_the_next_start(tmp_path: Path, alone: Groups) -> None:
    watch = watch_of(tmp_path, alone, 50, 30, 50)
    watch.start_from(30)
    assert json.loads((tmp_path / "logs" / FILE).read_text()) == {WEIGHTS: 30}


def test_start_trusts_a_checkpoint_no_more_than_the_last_check(tmp_path: Path, alone: Groups) -> None:
    """Also if the folder has no checkpoint up to the verified step: it was removed, or the start is a local one."""
    watch = watch_of(tmp_path, alone, 0, 10, 35)
    watch.start_from(35)
    assert watch.verified == {WEIGHTS: 0}


def test_records_of_an_abandoned_start_do_not_apply_any_more(tmp_path: Path, alone: Groups) -> None:
    watch = watch_of(tmp_path, alone, 20)
    watch.start_from(35, continues=False)
    assert json.loads((tmp_path / "logs" / FILE).read_text()) == {WEIGHTS: 35}


def test_first_interval_of_a_new_key_begins_at_its_start(tmp_path: Path, alone: Groups) -> None:
    watch_of(tmp_path, alone, 20)
    watch = CorruptionWatch(RunConfig(verify_state=100, verify_every=1000), alone, tmp_path)
    watch.start_from(35)
    assert watch.verified == {WEIGHTS: 20, GRADIENTS: 35}


def test_rollback_keeps_what_memory_has_verified_since_the_record(tmp_path: Path, alone: Groups) -> None:
    watch = watch_of(tmp_path, alone, 100)
    watch.start_from(100)
    watch.verified = {WEIGHTS: 40}
    watch.start_from(60)
    assert watch.verified == {WEIGHTS: 40}


DP2 = Layout(data=2)
Case = tuple[str | None, int | None, int | None]  # fault, run.verify_state, run.verify_every
Words = tuple[str, int, int, int]
OF_STATE: Words = ("state", 4, 1, 2)
LAYOUTS: dict[str, tuple[Layout, bool, dict[Case, Words]]] = {
    "dp2": (
        DP2,
        True,
        {
            ("exp_avg", 1, None): OF_STATE,
            ("exp_avg_sq", 3, 2): OF_STATE,
            ("master", 1, None): OF_STATE,
            ("own weight", 1, None): OF_STATE,
            ("weight", 1, None): ("weights", 4, -1, 2),
            ("gradient", None, 2): ("gradients", 5, -1, 2),
        },
    ),
    "dp3": (
        Layout(data=3),
        True,
        {("weight", 1, None): ("weights", 4, 1, 2), ("gradient", 2, 2): ("gradients", 5, 1, 2)},
    ),
    "dp2-plain": (DP2, False, {("master", 1, None): OF_STATE, ("gradient", None, 2): ("gradients", 5, -1, 2)}),
    "tp2-dp2": (
        Layout(tensor=2, data=2),
        True,
        {("weight", 1, None): ("weights", 4, -1, 2), ("gradient", None, 3): ("gradients", 4, -1, 0)},
    ),
    "ep2-dp2": (Layout(data=2, expert=2), True, {("weight", 1, None): ("weights", 4, -1, 2)}),
    "pp2-dp2": (Layout(pipeline=2, data=2), True, {("gradient", None, 2): ("gradients", 5, -1, 2)}),
}


@pytest.mark.gloo
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", slow_except(LAYOUTS, "dp2"))
def test_faults_are_found_in_time_and_quiet_runs_report_none(name: str, tmp_path: Path) -> None:
    layout, distributed, expected = LAYOUTS[name]
    (tmp_path / "logs").mkdir()
    config = configured(layout, distributed)
    every = None if layout.expert > 1 else 2  # no rank of several with experts computes a micro-batch alone
    cases = [(None, None, None), (None, 1, every), *expected]
    by_rank = run_distributed(watched, layout.world_size, config, tmp_path, cases, timeout_s=200)
    for without, checked, *of_faults in by_rank:
        assert without.fault is None
        assert checked.fault is None
        assert checked.digests == without.digests
        assert [found.fault for found in of_faults] == list(expected.values())


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_return_to_verified_checkpoints_and_end_as_undisturbed(ranks: Ranks) -> None:
    """Carried states and random states too have the bits of a run without checks."""
    assert ranks.train("without", 2, "run.deterministic=true") == [0, 0]
    undisturbed = ranks.last("without")

    assert ranks.train("checked", 2, *ALL) == [0, 0]
    assert_same(ranks.last("checked"), undisturbed)
    verified = json.loads((ranks.folder / "checked" / "logs" / "verified.json").read_text())
    assert verified == {"weights": RUN_STEPS - 2, "gradients": RUN_STEPS - 2}
    assert ranks.suspect("checked") == set()

    assert ranks.train("weight", 2, *ALL, fault="weight") == [0, 0]
    assert_same(ranks.last("weight"), undisturbed)
    (decision,) = ranks.decisions("weight")
    assert (decision["step"], decision["what"], decision["to"]) == (7, "rolled back", 4)
    assert "weights differ between copies" in decision["why"]
    assert ranks.suspect("weight") == {"suspect-step-00000006"}

    errors = ranks.train("master", 2, *STATE, fault="master")
    assert all("rank 1 at fault: optimizer state or own weights changed" in str(error) for error in errors), errors
    outcome = outcome_of(ranks.folder / "master")
    assert (outcome["outcome"], outcome["rank"], outcome["corrupt"]) == ("failed", 1, True)
    assert ranks.suspect("master") == {"suspect-step-00000006"}
    assert ranks.train("master", 2, *STATE) == [0, 0]
    assert_same(ranks.last("master"), undisturbed)
