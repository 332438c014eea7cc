"""Sparse attention beside a recurrence in training: its states are carried, and are in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from tests.train.conftest import Train

SPARSE = "model.layers.M={kind: mamba, state: 4, sparse: {keys: 4, hashes: 3}}"


def test_a_run_on_lanes_resumes_with_the_keys_that_it_had_kept(train_small: Train, tmp_path: Path) -> None:
    losses = {}
    for run, stops in (("through", [4]), ("again", [2, 4])):
        for stop in stops:
            arguments = [SPARSE, "phases.0.states.mode=tbtt", "data.order=lanes", f"run.dir={tmp_path / run}"]
            assert train_small(*arguments, f"run.max_steps={stop}") == 0
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        losses[run] = [json.loads(line).get("loss") for line in lines]
    assert losses["through"] == losses["again"]
