"""Sparse attention beside a recurrence in training: its states are carried and are in checkpoints, and its ranking loss
is reported.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.train.conftest import Train

SPARSE = "model.layers.M={kind: mamba, state: 4, sparse: {keys: 4, hashes: 3}}"


@pytest.mark.slow
def test_resumed_lanes_keep_their_sparse_keys(train_small: Train, tmp_path: Path) -> None:
    losses = {}
    for run, stops in (("through", [4]), ("again", [2, 4])):
        for stop in stops:
            arguments = [SPARSE, "phases.0.states.mode=tbtt", "data.order=lanes", f"run.dir={tmp_path / run}"]
            assert train_small(arguments, f"run.max_steps={stop}") == 0
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        losses[run] = [json.loads(line).get("loss") for line in lines]
    assert losses["through"] == losses["again"]


def test_the_ranking_loss_is_reported_beside_the_loss(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Initial scores give a loss near ln 2 for each of two layers, times alpha."""
    assert train_small(SPARSE, f"run.dir={tmp_path / 'run'}", "run.max_steps=2", "run.log_every=1") == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["auxiliary"].keys() for line in lines] == [{"ranking"}] * 2
    assert lines[0]["auxiliary"]["ranking"] == pytest.approx(2 * 0.1 * math.log(2), rel=0.05)
    assert f"loss {lines[1]['loss']:.4f}  ranking {lines[1]['auxiliary']['ranking']:.4f}  lr" in capsys.readouterr().out


@pytest.mark.slow
def test_recomputed_chunks_report_the_ranking_loss_once(train_small: Train, tmp_path: Path) -> None:
    ranking_losses = []
    for recompute in ("none", "layer"):
        through = ["phases.0.states.mode=tbtt", "data.order=lanes", "phases.0.states.chunks=2"]
        again = ["phases.0.states.through_time=true", f"parallel.recompute={recompute}", "run.max_steps=1"]
        assert train_small(SPARSE, through, again, f"run.dir={tmp_path / recompute}") == 0
        ranking_losses.append(json.loads((tmp_path / recompute / "metrics.jsonl").read_text())["auxiliary"]["ranking"])
    assert ranking_losses[0] == pytest.approx(ranking_losses[1], rel=1e-6)
    assert ranking_losses[0] == pytest.approx(2 * 0.1 * math.log(2), rel=0.05)
