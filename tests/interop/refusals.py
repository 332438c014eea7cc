"""The errors with which exports and imports are refused, for tests that compare their codes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hybridtron.cli import convert, convert_commands
from hybridtron.problems import Unusable

WORK = {
    "export": convert_commands.export_checkpoint,
    "import": convert_commands.import_model,
    "verify": convert_commands.verify_export,
}


def refusal(arguments: Sequence[object]) -> Unusable:
    """Return the error with which a command is refused. The program prints it, and its exit code is 2."""
    words = [str(argument) for argument in arguments]
    chosen = convert.parse(words)
    with pytest.raises(Unusable) as refused:
        WORK[chosen.command](chosen)
    assert convert.main(words) == 2
    return refused.value
