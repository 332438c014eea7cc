"""The picture of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import plot_metrics


def test_a_run_becomes_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"tokens": 10, "loss": 7.0}, {"tokens": 20, "loss": 6.0, "validation": {"1x": 6.5, "2x": 6.6}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("sys.argv", ["plot_metrics.py", str(tmp_path)])
    assert plot_metrics.main() == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, ""], ids=["no run", "no step yet"])
def test_nothing_to_draw(content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    monkeypatch.setattr("sys.argv", ["plot_metrics.py", str(tmp_path)])
    assert plot_metrics.main() == 2
    assert not (tmp_path / "loss.png").exists()
