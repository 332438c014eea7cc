"""The wheel and the sdist: their contents, and the commands that work for a user who has nothing else.

In the empty environment nothing of the checkout or of the developer's environment is visible, and the user can't write
to the installed files. pip's own configuration is left as the machine has it: the packages are several gigabytes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tarfile
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


def built(target: str, folder: Path) -> Path:
    """Build a wheel or an sdist of this checkout, without the network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("hybridtron-*")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("dist"))


def files_in(folder: Path) -> set[str]:
    """Return the files in a folder of the checkout, relative to the checkout, without Python's caches."""
    files = (path.relative_to(ROOT) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def test_wheel_holds_the_package_its_configs_and_its_benchmarks(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = files_in(ROOT / "hybridtron")  # C++ sources, job scripts and stubs too
    assert {Path(name).suffix for name in expected} >= {".py", ".cpp", ".h", ".sh", ".json", ".pyi", ".typed"}
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


def pip_without_network(*arguments: str) -> None:
    """Run this environment's pip; a build takes hatchling from here."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_sdist_holds_the_checkout_and_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = built("sdist", tmp_path)
    root = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.removeprefix(f"{root}/") for name in archive.getnames()}
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")[:-1]
    assert len(tracked) > 2000
    assert inside >= {*tracked, "PKG-INFO"}
    assert not [name for name in inside if name.endswith(".pyc") or name.startswith((".venv", "build/", "data/"))]

    pip_without_network("wheel", "--wheel-dir", str(tmp_path / "again"), str(sdist))
    (again,) = (tmp_path / "again").glob("*.whl")
    sums = [{file.filename: file.CRC for file in zipfile.ZipFile(path).infolist()} for path in (wheel, again)]
    assert sums[0] == sums[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_run_from_the_wheels_files_alone(wheel: Path, tmp_path: Path) -> None:
    """Packages are those of this environment. The compiled ops come from the user's cache, if they are there."""
    target = tmp_path / "target"
    home = tmp_path / "home"
    home.mkdir()
    pip_without_network("install", "--target", str(target), str(wheel))
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}

    def says(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=home, env=environment | {"PYTHONPATH": str(target)},
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    command = str(target / "bin/hybridtron")
    assert str(target / "hybridtron/__init__.py") in says("-c", "import hybridtron; print(hybridtron.__file__)")
    assert "hybridtron COMMAND" in says(command, "--help")
    assert "can run" in says(command, "doctor")
    assert "Modelled, not measured" in says(command, "rehearse", *SETTINGS)
    assert "finished at step 3" in says(command, "train", *SETTINGS)
    assert "def" in says(command, "generate", "run", "--prompt", "def", "--tokens", "5")
    assert "logits differ by" in says(command, "export", "run", "--output", "exported")
    assert "#SBATCH" in says(command, "submit", "recipe=samba_421m", "cluster=h100_infiniband", "nodes=2", "--dry-run")


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
