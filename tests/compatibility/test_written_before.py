"""Folders of earlier versions are read: a run, prepared tokens, an export, and weights to start from.

`write.py` makes the archive that a version leaves. It holds the losses of the run that was resumed, and of a run that
started from its weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from hybridtron.cli import train
from tests.compatibility.write import FROM_WEIGHTS, SHAPE, losses

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSIONS = [pytest.param("0.1.0", marks=pytest.mark.slow), "0.1.0.post2"]


@pytest.fixture(params=VERSIONS)
def before(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(HERE / f"written_by_{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def expected(name: str) -> list[float]:
    return pytest.approx(json.loads(Path("expected.json").read_text())[name], rel=1e-5)


def test_runs_of_earlier_versions_resume(before: Path) -> None:
    assert train.main([*SHAPE, "run.dir=run"]) == 0
    assert losses(before / "run")[10:] == expected("resumed")


def test_weights_of_earlier_versions_are_started_from(before: Path) -> None:
    assert train.main(FROM_WEIGHTS) == 0
    assert losses(before / "again") == expected("from_weights")


def test_prepared_tokens_of_earlier_versions_are_verified(before: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "verify_data.py"), "tokens"]
    assert subprocess.run(command, cwd=before).returncode == 0


@pytest.mark.slow
def test_exports_of_earlier_versions_are_loaded_and_imported(before: Path) -> None:
    # processes of their own: where hybridtron.hf was imported, transformers takes its class instead of the folder's
    load = "import transformers; transformers.AutoModelForCausalLM.from_pretrained('hf', trust_remote_code=True)"
    assert subprocess.run([sys.executable, "-c", load], cwd=before).returncode == 0
    command = [sys.executable, "-m", "hybridtron", "import", "--input", "hf", "--output", "imported"]
    imported = subprocess.run(command, cwd=before, capture_output=True, text=True)
    assert imported.returncode == 0, imported.stderr
    # the class of 0.1.0 has the cache's former name
    forgets = (before / "hf" / "ops_hybridtron.py").exists() and Version(version("transformers")) >= Version("5.24")
    assert ("export again" in imported.stderr) == forgets
