"""The tool that verifies a folder: its last line, its exit codes, and that it prints each fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hybridtron.cli import data_verify
from hybridtron.cli.main import main
from hybridtron.data.prepare.writer import write_folder
from tests.refusals import refusal, usage_error

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a")).to_str()
    splits = {"train": {"web": [[1, 2]] * 1000, "code": [[2]]}, "validation": {"web": [[1]]}}
    write_folder(tmp_path / "data", splits, tokenizer, 3, 0, {}, shard_size=4000)
    return tmp_path / "data"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/verify_data.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )


def test_undamaged_folder_passes(folder: Path):
    done = run(str(folder), "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}: 2 sources, 7 shards, 3.004K tokens: no fault\n"
    assert not done.stderr  # no bar where nobody looks


def test_every_fault_is_a_line(folder: Path, capsys: pytest.CaptureFixture[str]):
    shards = sorted((folder / "train/web").rglob("*.mds"))
    shards[1].unlink()
    shards[2].write_bytes(b"")
    assert main(["data", "verify", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train/web/part-00000/shard.00001.mds: ")
    assert lines[1].startswith("train/web/part-00000/shard.00002.mds: ")
    assert lines[-1].endswith(f": {len(lines) - 1} faults")


def test_missing_folder_and_wrong_options_are_refused(folder: Path):
    assert refusal(data_verify.main, [folder / "nothing"]).code == "no-file"
    assert usage_error(data_verify.main, [folder, "--workers", "0"]) == ("--workers", "malformed")
