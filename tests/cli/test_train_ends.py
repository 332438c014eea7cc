"""Ends of the training program: an error that a user can mend gives a message alone, without a traceback."""

from __future__ import annotations

import os

import pytest

from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.save import SaveError
from hybridtron.cli import train

MESSAGE = "3 checkpoints in a row could not be written"


def ended(error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Let training end with an error; return the program's output."""

    def failing(_: list[str]) -> int:
        raise error

    def left(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(train, "main", failing)
    monkeypatch.setattr(os, "_exit", left)
    with pytest.raises(SystemExit) as end:
        train.program([])
    assert end.value.code == 1
    return capfd.readouterr().err


@pytest.mark.parametrize("kind", [SaveError, BrokenCheckpoint])
def test_error_that_users_can_mend_has_no_traceback(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ended(kind(MESSAGE), monkeypatch, capfd) == f"{MESSAGE}\n"


def test_other_errors_have_a_traceback(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert "Traceback" in ended(KeyError("x"), monkeypatch, capfd)
