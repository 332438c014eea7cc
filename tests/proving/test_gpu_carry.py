"""The folder for a GPU machine without a network: calls of pip and of the rehearsal, sizes, and its script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron.proving.gpu import carry as gpu_carry
from hybridtron.proving.gpu import measure

ROOT = Path(__file__).parents[2]
VERSIONS = {"python": "3.12", "torch": "2.13.0", "triton": "3.6.0", "megatron-core": "0.16.1"}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Replace every command by one that writes a little output in its place; return the list of calls."""
    seen: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], environment: dict[str, str] | None = None) -> str:
        seen.append((command, environment or {}))
        if "download" in command:
            folder = Path(command[command.index("-d") + 1])
            folder.mkdir()
            (folder / "einops-0.8.2-py3-none-any.whl").write_bytes(bytes(1000))
        if "hybridtron.rehearse.queue_model" in command:
            (Path(command[3])).write_text('{"steps": {}, "calls": {}, "compiler": "abc"}')
            cache = Path((environment or {})["TRITON_CACHE_DIR"])
            cache.mkdir()
            (cache / "_backward.cubin").write_bytes(bytes(2**20))
        if "--target" in command:
            Path(command[command.index("--target") + 1]).mkdir()
        return json.dumps(VERSIONS)

    monkeypatch.setattr(gpu_carry, "run", run)
    return seen


def test_carried_folder_has_wheels_kernels_model_and_script(
    tmp_path: Path, commands: list[tuple[list[str], dict[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "mamba_ssm-2.3.2-cp312-cp312-linux_x86_64.whl").write_bytes(bytes(2 * 2**20))
    folder = tmp_path / ".carry"
    assert gpu_carry.main([str(folder), "--python", sys.executable, "--extra", str(extra)]) == 0
    assert {path.name for path in folder.iterdir()} == {
        "wheels", "triton", "modelled.json", "measure.sh", "carried.json"
    }  # fmt: skip
    download = next(command for command, _ in commands if "download" in command)
    assert {"megatron-core==0.16.1", "fla-core==0.6.0", "--no-deps", "3.12"} <= set(download)
    environment = next(variables for command, variables in commands if "hybridtron.rehearse.queue_model" in command)
    assert environment["TRITON_STORE_BINARY_ONLY"] == "1"
    assert json.loads((folder / "carried.json").read_text()) == VERSIONS
    assert re.search(r"3\.0[01] MiB", capsys.readouterr().out)


def test_folder_over_the_limit_exits_with_1(
    tmp_path: Path, commands: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_carry.main([str(tmp_path / "c"), "--python", sys.executable, "--limit-mib", "0.5"]) == 1
    assert "exceeds --limit-mib" in capsys.readouterr().out


def test_other_version_of_triton_exits_with_2(
    tmp_path: Path, commands: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_carry.main([str(tmp_path / "c"), "--python", sys.executable, "--triton", "3.7.1"]) == 2
    assert "3.6.0" in capsys.readouterr().out


def test_failed_program_ends_with_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        gpu_carry.run([sys.executable, "-c", "import sys; sys.exit('no such distribution')"])
    assert "distribution" in capsys.readouterr().err


def test_script_runs_the_queue(tmp_path: Path) -> None:
    """Call the script with a python3 that prints its arguments."""
    folder = tmp_path / ".carry"
    (folder / "wheels").mkdir(parents=True)
    (folder / "measure.sh").write_text(gpu_carry.SCRIPT.format(folder=".carry"))
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$TRITON_CACHE_DIR|$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    command = ["bash", str(folder / "measure.sh"), "results", "--minutes", "4.5"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    cache, _, arguments = done.stdout.splitlines()[-1].partition("|")
    assert cache == str(folder / "triton")
    module = "-m hybridtron.proving.gpu.measure "
    assert arguments.startswith(module)
    chosen = measure.parse(arguments.removeprefix(module).split())
    assert (chosen.output, chosen.minutes, chosen.modelled) == (Path("results"), 4.5, Path(".carry/modelled.json"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_second_process_reads_kernels_from_the_cache(tmp_path: Path) -> None:
    """A second process, like that on the GPU machine, finds every kernel in the cache."""
    pytest.importorskip("triton")
    file = tmp_path / "modelled.json"
    cache = tmp_path / "triton"
    command = [sys.executable, "-m", "hybridtron.rehearse.queue_model", str(file), "--recipe", "gla_360m", "--tiny"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    listed: list[set[str]] = []
    for machine_code_alone in ("1", "0"):  # as it is made, and as it is used
        storing = {**environment, "TRITON_STORE_BINARY_ONLY": machine_code_alone}
        subprocess.run(command, capture_output=True, text=True, env=storing, check=True)
        listed.append({path.relative_to(cache).as_posix() for path in cache.rglob("*")})
    modelled = json.loads(file.read_text())
    assert listed[0] == listed[1]
    names = {kernel["name"] for kernel in modelled["steps"]["gla_360m"]["kernels"]}
    assert {"gla.outputs", "norm.backward", "swiglu.forward"} <= names
    assert modelled["steps"]["gla_360m"]["device_ms"] > 0
    assert len(modelled["compiler"]) == 16
