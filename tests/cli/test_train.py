"""`hybridtron train` as a command: how torchrun learns that a configuration is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hybridtron.cli.main import main


def test_report_of_torchrun_ends_with_the_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank records the problems, as torchrun shows those of the first to end; a single rank prints them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, prints in (("0", True), ("1", False)):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert main(["train", "modle.width=3"]) == 2
        assert ("modle" in capsys.readouterr().err) == prints
        shown = ProcessFailure(int(rank), 1, 2, str(file))
        assert isinstance(shown.message, dict)
        assert "modle" in shown.message["extraInfo"]["py_callstack"]


def test_unwritable_error_file_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none/error.json"))
    assert main(["train", "modle.width=3"]) == 2
