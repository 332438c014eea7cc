"""The wheel: its contents, and the commands that work for a user who has nothing else, in an empty environment.

Nothing of the checkout or of the developer's environment is visible there, and the user can't write to the installed
files. pip's own configuration is left as the machine has it: the packages are several gigabytes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import hybridtron

ROOT = Path(__file__).parents[1]
NOBODY = 65534
PR_CAPBSET_DROP = 24
SETTINGS = ("run.dir=run", "run.max_steps=3", "run.eval_tokens=2048", "run.sample_tokens=4", "model.width=64")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout, without the network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_package_its_configs_and_its_benchmarks(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hybridtron").rglob("*.py")}
    for name, pattern in (("configs", "*.yaml"), ("benchmarks", "*.py")):
        expected |= {f"hybridtron/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / name).rglob(pattern)}
    assert len(expected) > 200
    assert expected <= inside
    assert "hybridtron/py.typed" in inside
    assert not [name for name in inside if name.endswith((".png", ".pyc")) or name.startswith("tests")]
    assert {name.split("/")[0] for name in inside} == {"hybridtron", f"hybridtron-{hybridtron.__version__}.dist-info"}


def test_wheel_names_its_command_its_extras_and_its_version(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        about = f"hybridtron-{hybridtron.__version__}.dist-info"
        metadata = archive.read(f"{about}/METADATA").decode()
        commands = archive.read(f"{about}/entry_points.txt").decode()
    assert f"\nVersion: {hybridtron.__version__}\n" in metadata
    for extra in ("prepare", "plot", "export", "metrics"):
        assert f"\nProvides-Extra: {extra}\n" in metadata
    assert "hybridtron = hybridtron.cli.main:program" in commands


def without_privileges() -> None:
    """Root becomes a user like any other from the next exec on: no capability, so permissions hold for it too.

    It keeps its number, since another user may not be let into the folder that its interpreter stands in.
    """
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


@dataclass(frozen=True)
class Installed:
    """An environment that nobody may write to, and a folder to work in."""

    venv: Path
    home: Path

    def pip(self, *arguments: str) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        command = [str(self.venv / "bin/python"), "-m", "pip", "install", "--quiet", *arguments]
        done = subprocess.run(
            command, cwd="/", env=environment, capture_output=True, text=True, timeout=1500, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        for path in (self.venv, *self.venv.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)
                if os.geteuid() == 0:
                    os.chown(path, NOBODY, NOBODY)  # or its owner could allow it again

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, by a user who can't write there."""
        environment = {"PATH": f"{self.venv / 'bin'}:/usr/bin:/bin", "HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [str(self.venv / "bin" / words[0]), *words[1:]],
            cwd=self.home, env=environment, capture_output=True, text=True, timeout=400, check=False,
            preexec_fn=without_privileges,
        )  # fmt: skip

    def says(self, *words: str) -> str:
        """Run a command that must succeed; return its output."""
        done = self.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Iterator[Installed]:
    folder = Path(tempfile.mkdtemp(prefix="wheel-"))
    try:
        user = Installed(folder / "venv", folder / "home")
        user.home.mkdir()
        venv.create(user.venv, with_pip=True)
        user.pip(str(wheel))
        yield user
    finally:
        for path in (folder / "venv", *(folder / "venv").rglob("*")):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_user_of_the_wheel_alone_trains_inspects_and_exports(wheel: Path, installed: Installed) -> None:
    where = installed.says("python", "-c", "import hybridtron; print(hybridtron.__file__)")
    assert Path(where.strip()).is_relative_to(installed.venv / "lib")
    assert "ModuleNotFoundError" in installed.run("python", "-c", "import pytest").stderr
    denied = f"open({str(installed.venv / 'lib' / 'new')!r}, 'w')"
    assert "PermissionError" in installed.run("python", "-c", denied).stderr

    assert "can run" in installed.says("hybridtron", "doctor")
    assert "8 layers" in installed.says("hybridtron", "inspect", *SETTINGS)
    assert "finished at step 3" in installed.says("hybridtron", "train", *SETTINGS)
    assert "def" in installed.says("hybridtron", "generate", "run", "--prompt", "def", "--tokens", "5")
    assert "no fault" in installed.says("hybridtron", "checkpoint", "verify", "run")

    refused = installed.run("hybridtron", "export", "run", "--output", "exported")
    assert (refused.returncode, 'pip install "hybridtron[export]"' in refused.stderr) == (2, True)
    installed.pip(f"{wheel}[export]")
    assert "logits differ by" in installed.says("hybridtron", "export", "run", "--output", "exported")
    assert installed.says("python", "-m", "hybridtron", "--version") == f"hybridtron {hybridtron.__version__}\n"
