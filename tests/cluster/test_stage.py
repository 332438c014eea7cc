"""The step of a job that copies data: each node's report, and what the job does after it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hybridtron.cluster import attempt, stage
from hybridtron.data import staging
from tests.train.conftest import small_run_arguments


def report_of(node: str, data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("SLURMD_NODENAME", node)
    (folder / "reports").mkdir(exist_ok=True)
    settings = [*small_run_arguments(data, folder / "run"), f"cluster.stage={folder / node}"]
    assert stage.main(["--reports", str(folder / "reports"), *settings]) == 0
    return json.loads((folder / "reports" / f"{node}.json").read_text())


def answer(folder: Path, capsys: pytest.CaptureFixture[str], restart: int = 0) -> str:
    """Return the answer that the job's script gets after the copy on the nodes n1 and n2."""
    (folder / "run" / "slurm").mkdir(parents=True, exist_ok=True)
    about = ["--run", str(folder / "run"), "--job", "7", "--restart", str(restart), "--nodes", "n1,n2"]
    attempt.main(["begin", *about])
    attempt.main(["check", "--copy", *about, "--reports", str(folder / "reports"), "--fitting", "1,2", "--spares", "0"])
    return capsys.readouterr().out.splitlines()[-1]


def test_job_continues_without_a_node_that_has_no_room(
    counting_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = report_of("n1", counting_folder, tmp_path, monkeypatch)
    assert good["faults"] == []
    assert "were missing" in good["measured"][0]
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))
    bad = report_of("n2", counting_folder, tmp_path, monkeypatch)
    assert "has 1 bytes free, but the data need " in bad["faults"][0]
    assert answer(tmp_path, capsys) == "go n1 n2 0"


def test_copy_prints_bytes_rate_and_time_left(
    counting_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybridtron.progress.REPORT_INTERVAL_S", -1.0)
    report_of("n1", counting_folder, tmp_path, monkeypatch)
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"n1: data on this node: ([\d.]+) of \1 GB, [\d.]+ GB/s, 0:00:00 left", line)


@pytest.mark.slow
def test_attempt_fails_if_no_node_can_copy(
    counting_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nodes must not be excluded then, one job's worth after the other; the second attempt stops the run."""
    data = tmp_path / "data"
    shutil.copytree(counting_folder, data)
    for shard in data.rglob("*.mds"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    for node in ("n1", "n2"):
        assert "digest" in report_of(node, data, tmp_path, monkeypatch)["faults"][0]
    assert answer(tmp_path, capsys) == "again - -"
    assert answer(tmp_path, capsys, restart=1) == "stop - -"
    assert "every node fails: n1 can't copy the data: " in (tmp_path / "run/slurm/attempts.jsonl").read_text()
