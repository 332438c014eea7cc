"""The picture of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtron.cli.main import main


def test_a_run_becomes_a_picture(tmp_path: Path) -> None:
    lines = [{"tokens": 10, "loss": 7.0}, {"tokens": 20, "loss": 6.0, "validation": {"1x": 6.5, "2x": 6.6}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["plot", str(tmp_path)]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, ""], ids=["no run", "no step yet"])
def test_nothing_to_draw(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main(["plot", str(tmp_path)]) == 2
    assert not (tmp_path / "loss.png").exists()
