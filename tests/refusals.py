"""Errors of users, as tests expect them: a code for the kind of fault, and names that the message must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from hybridtron.problems import Code, ConfigError, Unusable, UsageError

Command = Callable[[list[str]], int]


@contextmanager
def raises_code(error: type[Exception], code: Code, *names: object) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error with a code. Its message must contain the names: keys, options, files or numbers."""
    with pytest.raises(error) as caught:
        yield caught
    assert getattr(caught.value, "code", None) == code, caught.value
    message = str(caught.value)
    for name in names:
        assert str(name) in message


def refusal(command: Command, arguments: Sequence[object]) -> Unusable:
    """Return the error that a command raises. The program `hybridtron` prints it and ends with exit code 2."""
    with pytest.raises(Unusable) as refused:
        command([str(argument) for argument in arguments])
    return refused.value


def problem_codes(command: Command, arguments: Sequence[object]) -> dict[str, Code]:
    """Return the codes of a configuration's problems, by key."""
    with pytest.raises(ConfigError) as refused:
        command([str(argument) for argument in arguments])
    return {problem.key: problem.code for problem in refused.value.problems}


def usage_error(command: Command, arguments: Sequence[object]) -> tuple[str, Code]:
    """Return the option and the code of an error in a command line, which ends the process with exit code 2."""
    with pytest.raises(UsageError) as refused:
        command([str(argument) for argument in arguments])
    assert refused.value.code == 2
    problem = refused.value.problem
    return problem.key, problem.code
