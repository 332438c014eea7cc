"""The code of docs/extending.md: a task from outside of the package, as written."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

import hybridtron.tasks
from hybridtron.cli.main import main
from hybridtron.tasks.options import named
from hybridtron.tasks.tokens import ByteTokens
from tests.train.test_extending import run_code_of


def test_the_task_of_the_docs_is_shown_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "A task", ModuleType("A task"))  # dataclasses look for a class's module
    before = dict(hybridtron.tasks.TASKS)
    try:
        run_code_of("A task")
        task = named("next_word", ["letters=xyz"])
        sample = task.sample(0, 0, ByteTokens(), 60)
        *words, _, letter, _ = sample.prompt.split()
        assert task.score(sample, words[words.index(letter) + 1]) == {"exact": 1.0}
        assert task.score(sample, letter) == {"exact": 0.0}
        assert main(["tasks", "show", "next_word", "--length", "10"]) == 2
        assert "letters=abcdefgh" in capsys.readouterr().err
        output = tmp_path / "set"
        assert main(["tasks", "write", "next_word", "--length", "300", "--output", str(output)]) == 0
        assert len((output / "evaluation" / "next_word-300.jsonl").read_text().splitlines()) == 100
    finally:
        hybridtron.tasks.TASKS.clear()
        hybridtron.tasks.TASKS.update(before)
