"""The watch on torchrun, with small processes in its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import os, sys
from hybridtron.train.launcher import Launcher
launcher = Launcher(os.environ)
print(launcher.is_gone, flush=True)
sys.stdin.readline()  # until the parents have been killed
print(launcher.is_gone, flush=True)
"""
PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:])"
WRAPPED = ["sh", "-c", '"$@"; exit $?', "sh"]  # a shell that stays, as for a script with a trap


@pytest.mark.parametrize("wrapper", [[], WRAPPED], ids=["directly", "by a shell"])
@pytest.mark.parametrize(("run_id", "after_death"), [({"TORCHELASTIC_RUN_ID": "1"}, "True"), ({}, "False")])
def test_launcher_is_gone_when_torchrun_has_died(
    wrapper: list[str], run_id: dict[str, str], after_death: str, tmp_path: Path
) -> None:
    program = tmp_path / "child.py"
    program.write_text(CHILD)
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"} | run_id
    torchrun = subprocess.Popen(
        [sys.executable, "-c", PARENT, *wrapper, sys.executable, str(program)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert torchrun.stdin is not None
    assert torchrun.stdout is not None
    assert torchrun.stdout.readline() == "False\n"
    torchrun.send_signal(signal.SIGKILL)
    torchrun.wait()
    torchrun.stdin.write("\n")
    torchrun.stdin.flush()
    assert torchrun.stdout.readline() == f"{after_death}\n"
    torchrun.stdin.close()
    torchrun.stdout.close()
