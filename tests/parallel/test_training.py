"""The trainer under torchrun, on four processes, gives the losses of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 20


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train(run_dir: Path, data: Path, launcher: list[str], *settings: str) -> None:
    """The first steps of the laptop recipe, in a process of its own."""
    shared = [
        f"run.dir={run_dir}", f"data.path={data}", f"run.max_steps={STEPS}", "phases.0.micro_batch=2",
        "run.eval_tokens=2K", "run.eval_lengths=[1]", "run.sample_tokens=0",
        # at the first steps AdamW turns rounding of tiny gradients into whole updates, unless eps is coarse
        "optim.eps=1e-4",
    ]  # fmt: skip
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *shared, *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(1800)
def test_four_processes_under_torchrun_train_as_one(tmp_path: Path) -> None:
    train(tmp_path / "one", tmp_path / "data", [])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    train(tmp_path / "four", tmp_path / "data", launcher, "parallel.tensor=2", "parallel.pipeline=2")
    losses_of_one = losses(tmp_path / "one")
    four = losses(tmp_path / "four")
    assert len(losses_of_one) == STEPS
    assert losses_of_one[-1] < losses_of_one[0]
    assert four == pytest.approx(losses_of_one, rel=1e-4)
