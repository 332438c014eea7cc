"""Checks of a node before a run starts on it, with stand-ins for hardware that this machine lacks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hybridtron.cluster import preflight
from hybridtron.config.cluster import ChecksConfig
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed

SOUND = {
    "gpu=index": "0\n1", "gpu=ecc.errors.uncorrected.volatile.total": "0\n[N/A]", "gpu=retired_pages.pending": "No\nNo",
    "remapped-rows=remapped_rows.pending": "No\nNo", "remapped-rows=remapped_rows.failure": "No\nNo",
}  # fmt: skip


def nvidia_smi(folder: Path, answers: dict[str, str]) -> None:
    cases = "\n".join(f"  --query-{query}) printf '{answer}\\n' ;;" for query, answer in answers.items())
    (folder / "nvidia-smi").write_text(f"#!/bin/bash\ncase $1 in\n{cases}\n  *) exit 2 ;;\nesac\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({}, []),
        ({"gpu=index": "0"}, ["has 1 GPUs, but 2 are required"]),
        ({"gpu=ecc.errors.uncorrected.volatile.total": "0\n3"}, [f"GPU 1: {preflight.BROKEN[0]} is 3"]),
        ({"remapped-rows=remapped_rows.failure": "Yes\nNo"}, ["GPU 0: remapped_rows.failure is Yes"]),
    ],
)
def test_faults_of_gpus_are_reported(
    change: dict[str, str], faults: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, SOUND | change)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert preflight.gpu_faults(2) == faults


def test_failing_nvidia_smi_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (fault,) = preflight.gpu_faults(2)
    assert fault.startswith("nvidia-smi fails: ")


def test_a_network_adapter_needs_an_active_port(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(f"{state}\n")
    assert preflight.adapter_fault(tmp_path / "mlx5_0") is None
    assert "mlx5_1 " in (preflight.adapter_fault(tmp_path / "mlx5_1") or "")
    assert "mlx5_2 does not exist" in str(preflight.adapter_fault(tmp_path / "mlx5_2"))


def test_node_reports_its_resources_and_shortages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2.5e9))
    checks = ["cluster.checks.disk_gb=10", "cluster.checks.shared_gb=1", "cluster.checks.all_reduce=false"]
    asked = ["--reports", str(tmp_path), *checks]
    assert preflight.main(asked) == 0
    assert json.loads((tmp_path / "n7.json").read_text()) == {
        "node": "n7",
        "faults": [f"has 2.5 GB of free disk ({tmp_path}), 10 GB are required"],
        "together": "",
        "measured": ["free disk 2 GB", "/dev/shm 2 GB"],
    }
    assert capsys.readouterr().out.startswith("n7: has 2.5 GB of free disk")


def links(seat: Seat, nodes: list[str], broken: int | None, least: float) -> preflight.NodeReport:
    """Return a process's report of its node's links; the process `broken` adds up wrongly."""
    place = {"rank": seat.rank, "world_size": seat.world_size}
    dist.init_process_group("gloo", init_method=f"file://{seat.meeting_file}", **place)
    right = dist.all_reduce
    if seat.rank == broken:
        dist.all_reduce = lambda tensor, group: right(tensor, group=group) or tensor[-1:].add_(1)
    try:
        report = preflight.NodeReport(nodes[seat.rank])
        preflight.look_at_links(report, ChecksConfig(node_gb_per_s=least, network_gb_per_s=least), nodes)
    finally:
        dist.all_reduce = right
    return report


@pytest.mark.gloo
def test_slow_links_are_reported() -> None:
    one_node = run_distributed(links, 2, ["a", "a"], None, 0.0)
    assert [(report.faults, report.together) for report in one_node] == [([], ""), ([], "")]
    assert [report.measured[0].split()[0] for report in one_node] == ["all-reduce", "all-reduce"]
    two_nodes = run_distributed(links, 2, ["a", "b"], None, 1e6)
    assert [report.faults for report in two_nodes] == [[], []]
    assert all(report.together.endswith("GB/s, but 1e+06 GB/s are required") for report in two_nodes)
    assert "1e+06 GB/s are required" in run_distributed(links, 2, ["a", "a"], None, 1e6)[0].faults[0]


@pytest.mark.gloo
def test_rank_with_a_wrong_sum_is_reported_by_its_node() -> None:
    speaks, _ = run_distributed(links, 2, ["a", "a"], 1, 0.0)
    assert [fault.partition(":")[0] for fault in speaks.faults] == ["rank 1"]


@pytest.mark.gloo
def test_a_wrong_sum_over_all_nodes_is_in_every_node_s_report() -> None:
    reports = run_distributed(links, 4, ["a", "a", "b", "b"], 3, 0.0)
    assert all(
        "all nodes: rank 3 on b gets a wrong result from an all-reduce of ones over 4 ranks" in report.together
        for report in reports
    )


def test_all_ranks_with_wrong_sums_are_counted() -> None:
    assert preflight.wrong_sums(["", "", ""], ["a", "a", "b"]) == ""
    message = preflight.wrong_sums(["", "sums wrongly", "sums so"], ["a", "a", "b"])
    assert message == "rank 1 on a sums wrongly (2 ranks have this fault)"


@pytest.mark.parametrize(("local_rank", "name"), [("0", "n7.json"), ("1", "failed-9.json")])
def test_error_of_any_process_is_written(
    local_rank: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(report: preflight.NodeReport, checks: ChecksConfig) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error\nmore")

    place = {"SLURMD_NODENAME": "n7", "SLURM_LOCALID": local_rank, "SLURM_PROCID": "9", "SLURM_NTASKS": "16"}
    for variable, value in place.items():
        monkeypatch.setenv(variable, value)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(preflight, "compare_nodes", fail)
    assert preflight.main(["--reports", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert path.name == name
    fault = "all-reduce of all nodes: RuntimeError: CUDA error: uncorrectable ECC error"
    assert json.loads(path.read_text())["together"] == fault
    assert fault in capsys.readouterr().out
