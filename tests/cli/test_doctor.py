"""The doctor in a process of its own, with packages beside it that break in every way a package can."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridtron.cli import doctor
from hybridtron.requirements import requirements

ROOT = Path(__file__).parents[2]


def package(folder: Path, name: str, body: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(body)


def examine(*folders: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    return subprocess.run(
        [sys.executable, "-m", "hybridtron", "doctor"],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=100,
        check=False,
    )


def line_of(report: str, name: str) -> str:
    return next(line for line in report.splitlines() if line.split()[1:2] == [name])


@pytest.mark.slow
def test_broken_optional_packages_are_lines_of_the_report(tmp_path: Path) -> None:
    package(tmp_path, "flash_attn", "raise ImportError('undefined symbol: _ZN3c10')")
    package(tmp_path, "causal_conv1d", "import os; os._exit(3)")
    package(tmp_path, "mamba_ssm", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    package(tmp_path, "wandb", "print('hello from wandb'); __version__ = '9.9'")
    done = examine(tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    assert line_of(done.stdout, "flash_attn").split()[0] == "warn"
    assert "undefined symbol" in line_of(done.stdout, "flash_attn")
    assert "exit code 3" in line_of(done.stdout, "causal_conv1d")
    assert "signal 11" in line_of(done.stdout, "mamba_ssm")
    assert line_of(done.stdout, "wandb").split()[:3] == ["ok", "wandb", "9.9"]
    assert line_of(done.stdout, "selective_scan").split()[2] in ("native", "chunked"), "compiled, where a compiler is"
    assert done.stdout.endswith("training can run\n")


@pytest.mark.slow
def test_a_broken_required_package_is_exit_code_1(tmp_path: Path) -> None:
    package(tmp_path, "safetensors", "raise OSError('libtorch.so: cannot open shared object file')")
    done = examine(tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert not done.stderr
    assert "failed: safetensors" in done.stdout
    assert "libtorch.so" in line_of(done.stdout, "safetensors")
    assert "Traceback" not in done.stdout


def test_versions_are_compared_with_the_tested_range() -> None:
    assert doctor.inside("2.13.0+cpu", ">=2.11,<2.14")
    assert not doctor.inside("2.14", ">=2.11,<2.14")
    assert not doctor.inside("2.9.1", ">=2.11,<2.14")
    assert doctor.inside("1.4", ">=1.4.0")
    assert doctor.inside("0.16.1rc2", ">=0.16.1,<0.20")
    line = doctor.package_line("torch", ">=99", doctor.Probe(True))
    assert (line.mark, line.note) == ("warn", "outside the tested range: >=99")
    missing = doctor.package_line("no-such-package", ">=1", doctor.Probe(False))
    assert (missing.mark, missing.note) == ("fail", 'pip install "no-such-package>=1"')


def test_every_dependency_has_a_version_range() -> None:
    wanted = requirements()
    assert doctor.inside("3.11.0", wanted.python)
    assert not doctor.inside("3.14.0", wanted.python)
    assert {"torch", "numpy", "rich", "zstd"} <= wanted.required.keys()
    for versions in (wanted.required, *wanted.extras.values()):
        for version_range in versions.values():
            assert not doctor.inside("9999", version_range)
            assert not doctor.inside("0", version_range)


@pytest.mark.parametrize(("name", "version"), [("torch", "2.14.0"), ("megatron-core", "0.20.0")])
def test_untested_versions_get_a_warning(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda _: version)
    wanted = requirements().required[name]
    line = doctor.package_line(name, wanted, doctor.Probe(True))
    assert (line.mark, line.result) == ("warn", version)
    assert wanted in line.note


def test_missing_streaming_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report lists the package as missing from an extra, with the command that installs it."""
    monkeypatch.setattr(doctor, "installed", lambda name: {"mosaicml-streaming": None}.get(name, "1"))
    monkeypatch.setattr(doctor, "probe", lambda module: doctor.Probe(True, "1"))
    sections = dict(doctor.package_sections())
    assert "mosaicml-streaming" not in [line.name for line in sections["required"]]
    (line,) = [line for line in sections["extras"] if line.name == "streaming"]
    assert line.mark != "fail"
    assert 'pip install --no-deps "mosaicml-streaming==0.13.0" adds mosaicml-streaming' in line.note


def test_help_examines_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_sections", lambda: pytest.fail("it continued"))
    with pytest.raises(SystemExit) as end:
        doctor.main(["--help"])
    assert end.value.code == 0


def test_line_of_an_extra_counts_its_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", {"here": "2.0", "old": "0.1"}.get)
    assert doctor.extra_line("plot", {"here": ">=1,<3"}).mark == "ok"
    assert doctor.extra_line("plot", {"here": ">=1,<3", "old": ">=1,<3"}).mark == "warn"
    absent = doctor.extra_line("plot", {"here": ">=1,<3", "absent": ">=1,<3"})
    assert (absent.mark, absent.result) == ("none", "1 of 2")
    assert '".[plot]"' in absent.note


def test_a_flash_attn_without_the_functions_of_flash_attn_2_is_not_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn-4 brings `flash_attn.cute` alone."""
    package(tmp_path, "flash_attn", "")
    package(tmp_path / "flash_attn", "cute", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = doctor.probe(doctor.IMPORTED["flash_attn"])
    line = doctor.optional_line("flash_attn", doctor.OPTIONAL["flash_attn"], probe)
    assert line.mark == "warn"
    assert "flash_attn_interface" in line.note


def test_shared_folder_of_packages_does_not_make_them_all_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's libraries stand in `nvidia`, beside which there may be no `nvidia.dali`."""
    package(tmp_path / "shared_by_several", "here", "__version__ = '2'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.probe("shared_by_several.here").version == "2"
    assert doctor.optional_line("shared_by_several.dali", "", doctor.probe("shared_by_several.dali")).mark == "none"


def test_hanging_package_ends_after_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "hangs", "import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "PATIENCE", 2)
    start = time.monotonic()
    probe = doctor.probe("hangs")
    assert time.monotonic() - start < 30
    assert probe.installed
    assert probe.fault is not None
    assert "answer" in probe.fault


def test_missing_triton_is_reported_for_rehearse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "package_sections", list)
    monkeypatch.setattr(doctor, "attempt", lambda _: ("", [doctor.Line("ok", "all", "")]))
    monkeypatch.setattr("hybridtron.requirements.is_there", lambda name: name != "triton")
    assert doctor.main([]) == 0
    assert 'triton is not installed: pip install --editable ".[rehearse]"\ntraining can run' in capsys.readouterr().out
    monkeypatch.setattr("hybridtron.requirements.is_there", lambda name: True)
    assert doctor.main([]) == 0
    assert "rehearse" not in capsys.readouterr().out


def test_failing_section_becomes_a_line() -> None:
    def weather_section() -> tuple[str, list[doctor.Line]]:
        raise RuntimeError("no window")

    title, lines = doctor.attempt(weather_section)
    assert title == "weather"
    assert lines[0].note == "RuntimeError: no window"


def test_missing_settings_for_gpus_are_reported() -> None:
    lines = {line.name: line for line in doctor.gpu_lines({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, numa_nodes=2)}
    assert lines["CUDA_DEVICE_MAX_CONNECTIONS"].mark == "ok"
    missing = lines["PYTORCH_CUDA_ALLOC_CONF"]
    assert (missing.mark, missing.result) == ("none", "not set")
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in missing.note
    assert "--numa-binding" in lines["NUMA"].note
    assert "NUMA" not in {line.name for line in doctor.gpu_lines({}, numa_nodes=1)}


@pytest.mark.parametrize(
    ("device", "triton", "warned"),
    [
        ("NVIDIA H200, compute capability 9.0, 140 GiB", "3.6.0", True),
        ("NVIDIA H200, compute capability 9.0, 140 GiB", "3.7.1", False),
        ("NVIDIA A100, compute capability 8.0, 80 GiB", "3.6.0", False),
        ("NVIDIA H200, compute capability 9.0, 140 GiB", None, False),
    ],
)
def test_triton_without_the_fix_for_hopper_gets_a_warning(device: str, triton: str | None, warned: bool) -> None:
    lines = doctor.hopper_lines(["built for CUDA 13", device], triton)
    assert [line.mark for line in lines] == ["warn"] * warned
    assert all("3.7.1" in line.note for line in lines)
