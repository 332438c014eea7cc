"""`hybridtron train` as a command: how torchrun learns that a configuration is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hybridtron.cli.main import main


def test_torchrun_s_report_ends_with_the_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank records the problems, as torchrun shows those of the first to end; a single rank prints them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, prints in (("0", True), ("1", False)):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert main(["train", "modle.width=3"]) == 2
        assert ("did you mean model?" in capsys.readouterr().err) == prints
        shown = ProcessFailure(int(rank), 1, 2, str(file))
        assert isinstance(shown.message, dict)
        assert "did you mean model?" in shown.message["extraInfo"]["py_callstack"]


def test_a_file_that_can_not_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none/error.json"))
    assert main(["train", "modle.width=3"]) == 2
