"""Errors that a user can mend carry a code of a closed vocabulary."""

from __future__ import annotations

import pickle
from typing import get_args

import pytest

from hybridtron.problems import MEANINGS, Code, ConfigError, Problem, Unusable
from hybridtron.tasks.base import TaskError
from tests.docs.conftest import ROOT


def test_every_code_has_a_meaning_and_a_line_in_the_docs() -> None:
    assert list(MEANINGS) == sorted(get_args(Code))
    table = [f"| `{code}` | {meaning} |" for code, meaning in MEANINGS.items()]
    page = (ROOT / "docs" / "python_api.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| `")] == table


def test_codes_and_problems_survive_pickling() -> None:
    problems = (Problem("run.dir", "in-use", "is in use"), Problem("optim.lr", "missing", "must be set"))
    error = pickle.loads(pickle.dumps(ConfigError(problems)))
    assert (error.problems, error.code) == (problems, "in-use")
    task_error = pickle.loads(pickle.dumps(TaskError("no room", code="does-not-fit")))
    assert (type(task_error), str(task_error), task_error.code) == (TaskError, "no room", "does-not-fit")


def test_errors_without_a_code_are_refused() -> None:
    with pytest.raises(TypeError, match="code"):
        Unusable("wrong")  # pyrefly: ignore[missing-argument]


def test_problems_move_below_a_section() -> None:
    assert Problem("heads", "not-divisible", "is 3").below("model.layers.A").key == "model.layers.A.heads"
