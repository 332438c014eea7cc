"""Preflight: check that every node of a job can train.

The job script starts one process for each GPU before training. The first process on a node checks the node's GPUs,
disk, /dev/shm and network adapters. Then all processes initialize torch.distributed in the same way as training, and
compare their clocks. Finally they measure an all-reduce inside each node and over all nodes. So preflight finds ranks
that can't connect, wrong results from all-reduces, and slow links.

Each node's report is printed to the log and written to NODE.json in the reports folder. `attempt.py` reads the reports
and excludes bad nodes. The required values are in the configuration (`cluster.checks`). The check is short and does not
find GPUs that are only slightly slow.

Bandwidths are bus bandwidths as in NCCL's tests: 2 (n - 1) / n times the tensor's bytes, divided by the fastest round's
time, for n ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from hybridtron.config.cluster import ChecksConfig, ClusterConfig
from hybridtron.config.load import load
from hybridtron.config.pipeline_layout import launched
from hybridtron.problems import first_line
from hybridtron.train.jsonl import write_whole

ADAPTERS = Path("/sys/class/infiniband")
ROUNDS = 5
VALUES = {"cpu": 2**18, "cuda": 2**26}  # fp32 elements of the all-reduced tensor: 1 MiB on CPUs, 256 MiB on GPUs
BROKEN = (
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
)  # `nvidia-smi --query-gpu` fields that must be 0 or No
FAILED = "failed-"  # prefix of failed-RANK.json, written by processes that are not the first of their node
REMAPPED = "remapped_rows.pending", "remapped_rows.failure"  # `--query-remapped-rows` fields that must be 0 or No


@dataclass
class NodeReport:
    """A node's report.

    node: the node's name
    faults: this node's faults
    together: a fault of several nodes together, which can't be blamed on a single node; empty if there is none
    measured: measured values as text
    """

    node: str
    faults: list[str] = field(default_factory=list)
    together: str = ""
    measured: list[str] = field(default_factory=list)

    def write(self, folder: Path, name: str = "") -> None:
        """Write the report as NODE.json, or as NAME.json if `name` is not empty."""
        write_whole(folder / f"{name or self.node}.json", json.dumps(asdict(self)))


def main(arguments: list[str]) -> int:
    """Check this node, then all nodes together, and write the node's report. Always returns 0.

    The first process on a node writes NODE.json. If an all-reduce fails in another process, that process writes
    failed-RANK.json, because the first process may not see the error.
    """
    parser = argparse.ArgumentParser(description="Check that every node of a job can train.")
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings as for `hybridtron train`")
    options = parser.parse_intermixed_args(arguments)
    cluster = load(options.settings).cluster
    report = NodeReport(os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    is_first = os.environ.get("SLURM_LOCALID", "0") == "0"
    if is_first:
        look_at_node(report, cluster, options.reports)
        report.write(options.reports)
    if cluster.checks.all_reduce:
        try:
            compare_nodes(report, cluster.checks)
        except Exception as error:
            report.together = f"all-reduce of all nodes: {first_line(error)}"
            if not is_first:  # the node's first process may not see this error
                report.write(options.reports, f"{FAILED}{launched().rank}")
                print(f"{report.node}: rank {launched().rank}: {report.together}", flush=True)
    if is_first:
        report.write(options.reports)
        state = "; ".join([*report.faults, *filter(None, [report.together])]) or "ok"
        print(f"{report.node}: {state} ({', '.join(report.measured)})", flush=True)
    return 0


def look_at_node(report: NodeReport, cluster: ClusterConfig, folder: Path) -> None:
    """Check one node's disk, shared memory, GPUs and network adapters, and add the results to its report.

    `folder` is a folder in the file system to which the run writes.
    """
    checks = cluster.checks
    for what, path, least in (("free disk", folder, checks.disk_gb), ("/dev/shm", "/dev/shm", checks.shared_gb)):
        free = shutil.disk_usage(path).free / 1e9
        report.measured.append(f"{what} {free:.0f} GB")
        if free < least:
            report.faults.append(f"has {free:.1f} GB of {what} ({path}), {least:g} GB are required")
    if cluster.gpus_per_node:
        report.faults += gpu_faults(cluster.gpus_per_node)
        report.measured.append(f"{cluster.gpus_per_node} GPUs")
    report.faults += filter(None, [adapter_fault(ADAPTERS / device) for device in checks.fabric])


def gpu_faults(count: int) -> list[str]:
    """List faults in a node's GPUs: a wrong number of GPUs, and errors that nvidia-smi reports.

    `count` GPUs are required.
    """
    try:
        values_of = {name: _nvidia_smi("gpu", name) for name in BROKEN} | {
            name: _nvidia_smi("remapped-rows", name) for name in REMAPPED
        }
        num_gpus = len(_nvidia_smi("gpu", "index"))
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi fails: {error}"]
    if num_gpus != count:
        faults = [f"has {num_gpus} GPUs, but {count} are required"]
    else:
        faults = []
    return faults + [
        f"GPU {index}: {name} is {value}"
        for name, values in values_of.items()
        for index, value in enumerate(values)
        if value not in ("0", "No") and not value.startswith("[")  # [N/A]: this GPU model has no such counter
    ]


def _nvidia_smi(query: str, name: str) -> list[str]:
    command = ["nvidia-smi", f"--query-{query}={name}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [line.strip() for line in done.stdout.splitlines()]


def adapter_fault(device: Path) -> str | None:
    """Return a network adapter's fault, or None if a port is active; `device` is in /sys/class/infiniband."""
    states = [path.read_text().strip() for path in sorted(device.glob("ports/*/state"))]
    if any("ACTIVE" in state for state in states):
        return None
    return f"{device.name} has no active port ({', '.join(states) or f'{device} does not exist'})"


def compare_nodes(report: NodeReport, checks: ChecksConfig) -> None:
    """Initialize torch.distributed, compare the nodes' clocks, and check the links.

    Adds this node's results to `report`. Does nothing in a job with a single process.
    """
    import torch.distributed as dist

    from hybridtron.device import compute_device
    from hybridtron.parallel.plain_values import all_gather_values

    launch = launched()
    if launch.world_size == 1:
        return
    if compute_device().type == "cpu":
        backend = "gloo"
    else:
        backend = "cpu:gloo,cuda:nccl"
    rank_and_size = {"rank": launch.rank, "world_size": launch.world_size, "timeout": timedelta(seconds=checks.timeout)}
    dist.init_process_group(backend, init_method="env://", **rank_and_size)
    dist.barrier()
    clocks = [(node, clock) for node, clock in all_gather_values([report.node, time.time()])]
    off = dict(clocks)[report.node] - statistics.median(clock for _, clock in clocks)
    report.measured.append(f"clock {off:+.2f} s")
    if abs(off) > checks.clock_s:
        report.faults.append(f"has a clock {off:+.1f} s from the median, but at most {checks.clock_s:g} s are allowed")
    look_at_links(report, checks, [node for node, _ in clocks])
    dist.destroy_process_group()


def look_at_links(report: NodeReport, checks: ChecksConfig, node_of: list[str]) -> None:
    """Measure all-reduces inside each node and over all nodes, and check their results.

    `node_of` is the list of the ranks' nodes. A fault inside a node is added to this node's `report.faults`. A fault
    over all nodes can't be blamed on a single node, so it is stored in `report.together`.
    """
    import torch
    import torch.distributed as dist

    from hybridtron.device import compute_device
    from hybridtron.parallel.plain_values import all_gather_values

    nodes = list(dict.fromkeys(node_of))
    groups = {
        node: dist.new_group([rank for rank, its_node in enumerate(node_of) if its_node == node]) for node in nodes
    }
    tensor = torch.ones(VALUES[compute_device().type], device=compute_device())
    node_speed, local_fault = bandwidth(tensor, groups[report.node])
    report.faults += [
        f"rank {rank}: {fault}"
        for rank, fault in enumerate(all_gather_values(local_fault))
        if fault and node_of[rank] == report.node
    ]
    if node_speed is not None:
        report.measured.append(f"all-reduce {node_speed:.3g} GB/s inside the node")
        if checks.node_gb_per_s is not None and node_speed < checks.node_gb_per_s:
            report.faults.append(
                f"all-reduces at {node_speed:.3g} GB/s inside the node, but {checks.node_gb_per_s:g} GB/s are required"
            )
    network_speed, local_fault = bandwidth(tensor, dist.group.WORLD)
    over_all = wrong_sums(all_gather_values(local_fault), node_of)
    if len(nodes) > 1 and network_speed is not None:
        report.measured.append(f"{network_speed:.3g} GB/s over {len(nodes)} nodes")
        if checks.network_gb_per_s is not None and network_speed < checks.network_gb_per_s:
            over_all = (
                over_all or f"reaches {network_speed:.3g} GB/s, but {checks.network_gb_per_s:g} GB/s are required"
            )
    if over_all:
        report.together = f"all-reduce of all nodes: {over_all}"


def wrong_sums(fault_of: list[str], node_of: list[str]) -> str:
    """Return the fault of the first faulty rank as text, with the number of faulty ranks; empty without faults.

    fault_of: each rank's fault in the all-reduce over all nodes; empty if its results are right
    node_of: each rank's node
    """
    ranks = [rank for rank, fault in enumerate(fault_of) if fault]
    if not ranks:
        return ""
    count = f" ({len(ranks)} ranks have this fault)" if len(ranks) > 1 else ""
    return f"rank {ranks[0]} on {node_of[ranks[0]]} {fault_of[ranks[0]]}{count}"


def bandwidth(tensor: Any, group: Any) -> tuple[float | None, str]:
    """Measure an all-reduce. Returns (bus bandwidth in GB/s, fault); the fault is empty if all results are right.

    The bandwidth is None in a group with a single rank.
    """
    import torch.distributed as dist

    from hybridtron.device import synchronize

    size = dist.get_world_size(group)
    if size == 1:
        return None, ""
    times = []
    fault = ""
    for _ in range(ROUNDS):
        tensor.fill_(1)
        synchronize()
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        synchronize()
        times.append(time.perf_counter() - began)
        if not bool((tensor == size).all()):
            fault = f"gets a wrong result from an all-reduce of ones over {size} ranks: memory or links are broken"
    return 2 * (size - 1) / size * tensor.numel() * tensor.element_size() / min(times) / 1e9, fault


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
