"""What version 0.1.0 wrote is still read: a run's folder, prepared tokens, an export, and weights to start from.

The archive was made by its README's commands, and so are the losses in it: of the run that was resumed, and of one that
started from the weights of the first.
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

ROOT = Path(__file__).parents[2]
ARCHIVE = Path(__file__).with_name("written_by_0.1.0.tar.xz")


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def expected(name: str) -> list[float]:
    return pytest.approx(json.loads(Path("expected.json").read_text())[name], rel=1e-5)


SHAPE = [
    "data=folder", "data.path=tokens", "data.epochs=null", "model.width=16", "model.vocab_size=32",
    "model.layers.M.state=4", "model.layers.W.window=8", "model.layers.-.hidden=32", "phases.0.seq_len=16",
    "phases.0.global_batch=4", "phases.0.micro_batch=2", "phases.0.tokens=1280", "run.eval_tokens=256",
    "run.eval_every=10", "checkpoint.every=5", "checkpoint.keep=1", "optim.warmup=5%", "run.sample_tokens=0",
    "phases.0.states.mode=passing",
]  # fmt: skip


def test_a_run_resumes(before: Path) -> None:
    assert train.main([*SHAPE, "run.dir=run"]) == 0
    assert losses(before / "run")[10:] == expected("resumed")


def test_weights_are_started_from(before: Path) -> None:
    assert train.main([
        "recipe=length/state_passing", "run.weights=run", "run.dir=again", "run.sample_tokens=0", "run.max_steps=5",
        "checkpoint.every=5", "run.eval_tokens=256",
    ]) == 0  # fmt: skip
    assert losses(before / "again") == expected("from_weights")


def test_prepared_tokens_are_verified(before: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "verify_data.py"), "tokens"]
    assert subprocess.run(command, cwd=before).returncode == 0


def test_an_export_is_loaded_by_transformers_and_imported(before: Path) -> None:
    # processes of their own: where hybridtron.hf was imported, transformers takes its class instead of the folder's
    load = "import transformers; transformers.AutoModelForCausalLM.from_pretrained('hf', trust_remote_code=True)"
    assert subprocess.run([sys.executable, "-c", load], cwd=before).returncode == 0
    command = [sys.executable, "-m", "hybridtron", "import", "--input", "hf", "--output", "imported"]
    imported = subprocess.run(command, cwd=before, capture_output=True, text=True)
    assert imported.returncode == 0, imported.stderr
    renamed = Version(version("transformers")) >= Version("5.24")  # the cache, whose former name that class has
    assert ("export again" in imported.stderr) == renamed
