"""The decay of a WSD schedule from an earlier checkpoint, as docs/phases.md describes it: as a phase, and in one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtron.checkpoint.folder import all_of, folder_of
from tests.docs.test_commands import write_recipes
from tests.train.conftest import Refused, Train
from tests.train.test_phases import tensors

STABLE = ["optim.schedule=wsd", "optim.decay=0", "optim.warmup=0", "checkpoint.every=4", "checkpoint.keep=10"]
DECAY = ["seq_len=16", "global_batch=4", "micro_batch=2", "tokens=256", "lr_to=1e-4"]  # four steps


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_phase_decays_from_an_earlier_checkpoint(train_small: Train, tmp_path: Path) -> None:
    """The recipe of the page: the branch equals a run that trains both phases, and the constant run stays unchanged."""
    write_recipes(tmp_path)
    branched = [f"recipe={tmp_path}/decayed.yaml", "phases.0.tokens=256", "phases.0.lr=1e-2", *STABLE]
    branched += [f"phases.1.{setting}" for setting in DECAY]
    constant = tmp_path / "run"
    assert train_small("phases.0.tokens=768", "phases.0.lr=1e-2", *STABLE) == 0
    assert [line["lr"] for line in lines(constant)] == pytest.approx([1e-2] * 12)
    before = tensors(constant, 12)
    branch = tmp_path / "branch"
    resume = f"run.resume={folder_of(constant, 4)}"
    assert train_small(*branched, resume, f"run.dir={branch}") == 0
    assert [line["step"] for line in lines(branch)] == [5, 6, 7, 8]
    rates = [line["lr"] for line in lines(branch)]
    assert rates == pytest.approx([1e-4 + (1e-2 - 1e-4) * share for share in (0.75, 0.5, 0.25, 0)])
    whole = tmp_path / "whole"
    assert train_small(*branched, f"run.dir={whole}") == 0
    ended = tensors(branch, 8)
    expected = tensors(whole, 8)
    assert [key for key in expected if not torch.equal(ended[key], expected[key])] == []
    assert all(torch.equal(tensors(constant, 12)[key], value) for key, value in before.items())


def test_a_shorter_run_decays_on_the_same_order_of_data(train_small: Train, tmp_path: Path) -> None:
    """The branch reads the rows that the constant run reads next, so that its first loss is the same."""
    constant = tmp_path / "run"
    assert train_small("phases.0.tokens=768", "phases.0.lr=1e-2", *STABLE) == 0
    branch = tmp_path / "branch"
    shorter = ["phases.0.tokens=512", "phases.0.lr=1e-2", *STABLE, "optim.decay=256", "optim.final_lr=0.01"]
    assert train_small(*shorter, f"run.resume={folder_of(constant, 4)}", f"run.dir={branch}") == 0
    of_constant = {line["step"]: line for line in lines(constant)}
    of_branch = {line["step"]: line for line in lines(branch)}
    assert list(of_branch) == [5, 6, 7, 8]
    assert of_branch[5]["loss"] == of_constant[5]["loss"]
    assert of_branch[8]["loss"] != of_constant[8]["loss"]
    assert of_branch[8]["lr"] == pytest.approx(1e-4)


@pytest.mark.slow
def test_a_branch_without_a_checkpoint_of_its_own_does_not_start_from_new_weights(
    train_small: Train, refused: Refused, tmp_path: Path
) -> None:
    """A kill before the branch's first checkpoint leaves its folder as it is after the checkpoints are removed."""
    assert train_small("phases.0.tokens=256", *STABLE) == 0
    branch = tmp_path / "branch"
    again = ["phases.0.tokens=384", *STABLE, f"run.dir={branch}"]
    resume = f"run.resume={folder_of(tmp_path / 'run', 4)}"
    assert train_small(*again, resume) == 0
    before = (branch / "metrics.jsonl").read_bytes()
    remove_checkpoints(branch)
    for _ in range(2):
        problem = refused(*again)["run.resume"]
        assert problem.code == "missing"
        assert resume in problem.message
        assert (branch / "metrics.jsonl").read_bytes() == before
    assert train_small(*again, resume) == 0
    assert [line["step"] for line in lines(branch)] == [5, 6]
    assert train_small(*again) == 0  # continues from its own checkpoint
    remove_checkpoints(branch)
    assert train_small(*again, "run.resume=never", "run.max_steps=1") == 0
    assert [line["step"] for line in lines(branch)] == [1]


def test_a_run_from_new_weights_without_a_checkpoint_starts_again(train_small: Train, tmp_path: Path) -> None:
    """So does a run whose configuration is damaged: nothing says that it began elsewhere."""
    run = tmp_path / "run"
    assert train_small("run.max_steps=2") == 0
    remove_checkpoints(run)
    assert train_small("run.max_steps=2") == 0
    assert [line["step"] for line in lines(run)] == [1, 2]
    remove_checkpoints(run)
    (run / "config.yaml").write_text("run: {")
    assert train_small("run.max_steps=2") == 0
    assert [line["step"] for line in lines(run)] == [1, 2]


def remove_checkpoints(run: Path) -> None:
    for folder in all_of(run):
        shutil.rmtree(folder)
    (run / "checkpoints" / "latest").unlink(missing_ok=True)
