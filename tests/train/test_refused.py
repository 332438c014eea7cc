"""Batches of refused steps: as training had them, only the newest, and what a replay computes of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of as checkpoint_of
from hybridtron.cli import replay
from hybridtron.cli.main import main
from hybridtron.config.resolve import resolve
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.data.loader import build_loader
from hybridtron.engine.step_guard import StepGuard
from hybridtron.problems import Unusable
from hybridtron.train.refused import folder_of, kept_batches, read_batch, tensors_of
from hybridtron.train.replay import replay_of
from hybridtron.train.skipped_data import BatchKey
from tests.cli.test_evaluate import lines_of
from tests.refusals import raises_code
from tests.slow import slow_except
from tests.train.conftest import Train
from tests.train.faults import spoiled
from tests.train.test_skips import decisions, micro_batches


def refusing(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """The guard refuses these steps, counted from 1, whatever they are."""
    accepts = StepGuard.accepts
    calls: list[float] = []

    def refuses(guard: StepGuard, norm: float, loss: float) -> bool:
        calls.append(norm)
        return accepts(guard, norm, math.nan if len(calls) in steps else loss)

    monkeypatch.setattr(StepGuard, "accepts", refuses)


def test_the_newest_refused_batches_are_kept(train_small: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with spoiled(math.nan, micro_batches(2, 4, 6)):
        assert train_small("run.max_steps=7", "run.keep_refused=2") == 0
    assert [path.name for path in kept_batches(run)] == ["phase-0-batch-00000003", "phase-0-batch-00000005"]
    lines = decisions(run)
    assert [line["data"] for line in lines] == [[0, 1], [0, 3], [0, 5]]
    folder = folder_of(run, BatchKey(*lines[-1]["data"]))
    kept = read_batch(folder, turns=1)
    assert (kept.step, kept.why) == (6, lines[-1]["why"])
    phase = resolve(Checkpoint.open(checkpoint_of(run, 7)).config)[0]
    for batch, expected in zip(kept.batches, build_loader(phase).micro_batches(5), strict=True):
        assert tensors_of([batch]).keys() == tensors_of([expected]).keys()
        for name, tensor in tensors_of([batch]).items():
            assert tensor.equal(tensors_of([expected])[name]), name
        assert batch.seq.spans() == expected.seq.spans()


def test_keep_refused_0_keeps_no_batch(train_small: Train, tmp_path: Path) -> None:
    with spoiled(math.nan, micro_batches(2)):
        assert train_small("run.max_steps=3", "run.keep_refused=0") == 0
    assert kept_batches(tmp_path / "run") == []
    with raises_code(Unusable, "no-file"):
        replay.main([str(tmp_path / "run")])


@pytest.mark.parametrize("name", ["save", "make_room"])
def test_runs_continue_when_a_refused_batch_cannot_be_kept(
    name: str, train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> bytes:
        raise OSError("no space left")

    monkeypatch.setattr(f"hybridtron.train.refused.{name}", full)
    with spoiled(math.nan, micro_batches(2)):
        assert train_small("run.max_steps=3") == 0
    assert "is not kept: no space left" in (tmp_path / "run/logs/log-0.txt").read_text()


@pytest.mark.parametrize("mode", slow_except(["zero", "passing", "tbtt"], "passing"))
def test_a_replay_computes_the_same_step(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """From a checkpoint of the step before, its loss and its gradient norm have the same bits."""
    refusing(monkeypatch, 4)
    settings = ("checkpoint.every=1", "checkpoint.keep=9", "run.layer_norms=true", f"states.mode={mode}")
    assert train_small("run.max_steps=6", settings) == 0
    run = tmp_path / "run"
    (folder,) = kept_batches(run)
    before = sorted(path.name for path in run.rglob("*"))
    with replay_of(run, folder) as replayed:
        assert replayed.checkpoint is not None
        assert replayed.checkpoint.meta.step == 3
        usual = replayed.run({})
        again = replayed.run({})
        reference = replayed.run({"*": "reference"})
    assert sorted(path.name for path in run.rglob("*")) == before
    line = lines_of(run / "metrics.jsonl")[3]
    assert usual.loss == pytest.approx(line["loss"], rel=1e-7)
    assert usual.grad_norm == pytest.approx(line["grad_norm"], rel=1e-6)
    assert {name: norm for name, norm in line["layers"].items() if name.endswith(".grad_norm")} == pytest.approx(
        {f"{name}.grad_norm": norm for name, norm in usual.layers.items()}, rel=1e-5
    )
    assert again == usual
    assert reference.loss == pytest.approx(usual.loss, rel=1e-4)


@pytest.mark.parametrize("fuses", [True, False])
def test_a_replay_after_a_failed_one_computes_the_same_step(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuses: bool
) -> None:
    """The fused addition of gradients is used if the run used it."""
    refusing(monkeypatch, 2)
    assert train_small("run.max_steps=2", f"parallel.gradient_accumulation_fusion={str(fuses).lower()}") == 0
    run = tmp_path / "run"
    (folder,) = kept_batches(run)

    def fail() -> None:
        raise RuntimeError("planted")

    with replay_of(run, folder) as replayed:
        assert replayed.engine.config.parallel.gradient_accumulation_fusion is fuses
        usual = replayed.run({})
        with monkeypatch.context() as patch:
            patch.setattr(replayed.engine.optimizer, "norms", fail)
            with pytest.raises(RuntimeError, match="planted"):
                replayed.run({})
        assert replayed.run({}) == usual


def test_the_command_prints_both_replays_and_the_rows(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusing(monkeypatch, 2, 5)
    assert train_small("run.max_steps=5") == 0
    run = str(tmp_path / "run")
    capsys.readouterr()
    assert main(["replay", run, "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "phase-0-batch-00000001  step 2: the loss is nan",
        "phase-0-batch-00000004  step 5: the loss is nan",
    ]
    assert main(["replay", run, "--text", "--batch", "phase-0-batch-00000001"]) == 0
    printed = capsys.readouterr().out
    assert "the loss is nan" in printed
    assert "row 3, " in printed
    assert all(name in printed for name in ("loss", "gradient norm", "reference", "embedding"))
    with raises_code(Unusable, "unknown-name", "phase-0-batch-0000000"):
        replay.main([run, "--batch", "phase-0-batch-00000002"])
    with raises_code(Unusable, "no-file", tmp_path):
        replay.main([str(tmp_path)])


def numbered_rows(rows: int, length: int) -> Batch:
    tokens_BL = torch.arange(rows * length).view(rows, length)
    positions_BL = torch.arange(length).expand(rows, length)
    documents_BL = (positions_BL >= 3).to(torch.int32)
    seq = SeqInfo(positions_BL, documents_BL)
    continues_B = torch.arange(rows) % 2 == 0
    return Batch(tokens_BL, tokens_BL + 1, tokens_BL % 3 > 0, seq, continues_B)


def test_rows_of_ranks_are_joined_in_the_order_of_one_process(tmp_path: Path) -> None:
    """Two data-parallel ranks, each of two that share rows; two chunks of two groups of lanes."""
    folder = tmp_path / "phase-1-batch-00000007"
    folder.mkdir()
    (folder / "about.json").write_text(json.dumps({"step": 9, "why": "the loss is nan"}))
    rows = numbered_rows(16, 6).split(2)  # in the order of one process: chunk, data-parallel rank, group
    for data in range(2):
        for context in range(2):
            share = slice(3 * context, 3 * context + 3)
            of_rank = [rows[turn * 4 + data * 2 + group] for turn in range(2) for group in range(2)]
            shares = [_shared(batch, share) for batch in of_rank]
            save_file(tensors_of(shares), folder / f"data-{data:05}-context-{context:05}.safetensors")
    batches = read_batch(folder, turns=2).batches
    assert torch.cat([batch.tokens_BL for batch in batches]).equal(torch.cat([batch.tokens_BL for batch in rows]))
    for batch, expected in zip(batches, rows, strict=True):
        assert tensors_of([batch]).keys() == tensors_of([expected]).keys()
        assert all(tensor.equal(tensors_of([expected])[name]) for name, tensor in tensors_of([batch]).items())


def _shared(batch: Batch, share: slice) -> Batch:
    seq = batch.seq.map(lambda tensor: tensor[:, share])
    return replace(
        batch,
        tokens_BL=batch.tokens_BL[:, share],
        labels_BL=batch.labels_BL[:, share],
        mask_BL=batch.mask_BL[:, share],
        seq=seq,
    )
