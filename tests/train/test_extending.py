"""The code of docs/extending.md: a learning-rate shape and a metrics sink from outside of the package, as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridtron.config import lr_shapes
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.units import parse_tokens
from hybridtron.train import sinks
from hybridtron.train.lr import learning_rate
from tests.train.conftest import Train
from tests.train.test_metrics import reported, rolled_back

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def run_code_of(section: str) -> None:
    """Execute the block of Python under a heading."""
    (block,) = re.findall(rf"^## {section}\n.*?^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(block, f"{PAGE}: {section}", "exec"), {"__name__": section})


def test_the_schedule_of_the_docs_trains() -> None:
    before = dict(lr_shapes.SHAPES)
    wanted = ["optim.schedule=square_root", "optim.decay=50%", "optim.warmup=0", "optim.final_lr=0", "phases.0.lr=1"]
    assert [problem.key for problem in check(RunPlan.of(load(wanted)))] == ["optim.schedule"]
    try:
        run_code_of("A learning-rate shape")
        config = load(wanted)
        assert check(RunPlan.of(config)) == []
        phases = resolve(config)
        whole = parse_tokens(phases[0].settings.tokens)
        rates = [learning_rate(phases, 0, round(share * whole)) for share in (0.25, 0.5, 0.625, 1.0)]
        assert rates == pytest.approx([1.0, 1.0, 0.5, 0.0], abs=1e-2)
        assert [problem.key for problem in check(RunPlan.of(load([*wanted, "optim.decay=101%"])))] == [
            "optim.warmup"
        ]  # decay with it
    finally:
        lr_shapes.SHAPES.clear()
        lr_shapes.SHAPES.update(before)


def test_the_sink_of_the_docs_sees_resume_and_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_small: Train
) -> None:
    monkeypatch.setattr(sinks, "SINKS", dict(sinks.SINKS))
    run_code_of("A metrics sink")
    metrics = reported(tmp_path, 1, 2, 3, 4)
    metrics.on_decision(rolled_back(2))
    metrics.close()
    assert _steps(tmp_path) == [1, 2]
    reported(tmp_path, 3, 4, 5, resumed=2).close()
    assert _steps(tmp_path) == [1, 2, 3, 4, 5]
    reported(tmp_path, 5, resumed=4).close()
    assert _steps(tmp_path) == [1, 2, 3, 4, 5]
    assert train_small("run.max_steps=3") == 0
    assert _steps(tmp_path / "run") == [1, 2, 3]


def _steps(folder: Path) -> list[int]:
    return [int(line.split(",")[0]) for line in (folder / "losses.csv").read_text().splitlines()]
