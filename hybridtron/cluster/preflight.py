"""Preflight: check that every node is fit to train on.

A job's script runs it as one process for each GPU, before the run itself. The first process on a node checks its GPUs,
disk, /dev/shm and network adapters. Then all processes connect as the run's will, and all-reduce a small tensor inside
each node and over all nodes. This shows whether ranks find each other, how fast the links are, and which clocks are
off. Each node's report is a line in the log and NODE.json in the reports folder; `attempt.py` acts on the reports.
Required values are in `cluster` in the run's own settings. The check is short and does not replace a burn-in: a GPU
that is only slightly slow passes.

Bus bandwidth is 2 (n - 1) / n times the bytes, over the time of the fastest round, as in NCCL's tests.
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
from hybridtron.config.layout import launched
from hybridtron.config.load import load
from hybridtron.train.records import write_whole

ADAPTERS = Path("/sys/class/infiniband")
ROUNDS = 5
VALUES = {"cpu": 2**18, "cuda": 2**26}  # fp32 entries: 1 MiB over sockets, 256 MiB over NVLink and adapters
BROKEN = "ecc.errors.uncorrected.volatile.total", "retired_pages.pending"  # nvidia-smi fields that must be 0 or No
FAILED = "failed-"  # the name of a process's own report begins with this; its rank follows
REMAPPED = "remapped_rows.pending", "remapped_rows.failure"


@dataclass
class NodeReport:
    """A node's report: its own faults, a fault of all nodes together, and measured values as text."""

    node: str
    faults: list[str] = field(default_factory=list)
    together: str = ""
    found: list[str] = field(default_factory=list)

    def write(self, folder: Path, name: str = "") -> None:
        """Write the report as NODE.json, or as another file if a name is given."""
        write_whole(folder / f"{name or self.node}.json", json.dumps(asdict(self)))


def main(arguments: list[str]) -> int:
    """Check this node, then all nodes together, and write the node's report. Always returns 0.

    The node's first process writes NODE.json. Another process whose all-reduces fail writes failed-RANK.json.
    """
    parser = argparse.ArgumentParser(description="Is every node fit to train on?")
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as `hybridtron train` takes them")
    asked = parser.parse_intermixed_args(arguments)
    cluster = load(asked.settings).cluster
    report = NodeReport(os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    is_first = os.environ.get("SLURM_LOCALID", "0") == "0"
    if is_first:
        look_at_node(report, cluster, asked.reports)
        report.write(asked.reports)
    if cluster.checks.all_reduce:
        try:
            compare_nodes(report, cluster.checks)
        except Exception as error:
            report.together = f"all-reduce of all nodes: {type(error).__name__}: {error}".splitlines()[0]
            if not is_first:  # the node's first process may not notice this error
                report.write(asked.reports, f"{FAILED}{launched().rank}")
                print(f"{report.node}: rank {launched().rank}: {report.together}", flush=True)
    if is_first:
        report.write(asked.reports)
        state = "; ".join([*report.faults, *filter(None, [report.together])]) or "ok"
        print(f"{report.node}: {state} ({', '.join(report.found)})", flush=True)
    return 0


def look_at_node(report: NodeReport, cluster: ClusterConfig, folder: Path) -> None:
    """Check one node's disk, shared memory, GPUs and adapters. `folder` is where the run is written."""
    checks = cluster.checks
    for what, path, least in (("free disk", folder, checks.disk_gb), ("/dev/shm", "/dev/shm", checks.shared_gb)):
        free = shutil.disk_usage(path).free / 1e9
        report.found.append(f"{what} {free:.0f} GB")
        if free < least:
            report.faults.append(f"has {free:.1f} GB of {what} ({path}), {least:g} are required")
    if cluster.gpus_per_node:
        report.faults += gpu_faults(cluster.gpus_per_node)
        report.found.append(f"{cluster.gpus_per_node} GPUs")
    report.faults += filter(None, [adapter_fault(ADAPTERS / device) for device in checks.fabric])


def gpu_faults(count: int) -> list[str]:
    """Report missing GPUs, and errors that GPUs themselves report."""
    try:
        values_of = {name: _nvidia_smi("gpu", name) for name in BROKEN} | {
            name: _nvidia_smi("remapped-rows", name) for name in REMAPPED
        }
        num_gpus = len(_nvidia_smi("gpu", "index"))
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi fails: {error}"]
    if num_gpus != count:
        faults = [f"has {num_gpus} GPUs, {count} are required"]
    else:
        faults = []
    return faults + [
        f"GPU {index}: {name} is {value}"
        for name, values in values_of.items()
        for index, value in enumerate(values)
        if value not in ("0", "No") and not value.startswith("[")  # [N/A]: this GPU model has no such counter
    ]


def _nvidia_smi(of: str, name: str) -> list[str]:
    command = ["nvidia-smi", f"--query-{of}={name}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [line.strip() for line in done.stdout.splitlines()]


def adapter_fault(device: Path) -> str | None:
    """Describe why a network adapter can't be used, or return None."""
    states = [path.read_text().strip() for path in sorted(device.glob("ports/*/state"))]
    if any("ACTIVE" in state for state in states):
        return None
    return f"{device.name} has no active port ({', '.join(states) or f'{device} is not there'})"


def compare_nodes(report: NodeReport, checks: ChecksConfig) -> None:
    """Connect all processes, compare their nodes' clocks, and check the links between them."""
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
    place = {"rank": launch.rank, "world_size": launch.world_size, "timeout": timedelta(seconds=checks.timeout)}
    dist.init_process_group(backend, init_method="env://", **place)
    dist.barrier()
    clocks = [(node, clock) for node, clock in all_gather_values([report.node, time.time()])]
    off = dict(clocks)[report.node] - statistics.median(clock for _, clock in clocks)
    report.found.append(f"clock {off:+.2f} s")
    if abs(off) > checks.clock_s:
        report.faults.append(f"has a clock that is {off:+.1f} s off, {checks.clock_s:g} s are allowed")
    look_at_links(report, checks, [node for node, _ in clocks])
    dist.destroy_process_group()


def look_at_links(report: NodeReport, checks: ChecksConfig, node_of: list[str]) -> None:
    """Measure speed and correctness of all-reduces inside each node and over all nodes.

    `node_of` gives each rank's node. A fault inside a node is added to that node's faults. A fault over all nodes can't
    be blamed on one of them, so it is stored in `report.together`.
    """
    import torch
    import torch.distributed as dist

    from hybridtron.device import compute_device
    from hybridtron.parallel.plain_values import all_gather_values

    nodes = list(dict.fromkeys(node_of))
    groups = {node: dist.new_group([rank for rank, of in enumerate(node_of) if of == node]) for node in nodes}
    tensor = torch.ones(VALUES[compute_device().type], device=compute_device())
    node_speed, local_fault = bandwidth(tensor, groups[report.node])
    report.faults += [
        f"rank {rank} there {fault}"
        for rank, fault in enumerate(all_gather_values(local_fault))
        if fault and node_of[rank] == report.node
    ]
    if node_speed is not None:
        report.found.append(f"all-reduce {node_speed:.3g} GB/s inside")
        if checks.node_gb_per_s is not None and node_speed < checks.node_gb_per_s:
            report.faults.append(f"sums at {node_speed:.3g} GB/s inside, {checks.node_gb_per_s:g} are required")
    network_speed, local_fault = bandwidth(tensor, dist.group.WORLD)
    over_all = wrong_sums(all_gather_values(local_fault), node_of)
    if len(nodes) > 1 and network_speed is not None:
        report.found.append(f"{network_speed:.3g} GB/s over {len(nodes)} nodes")
        if checks.network_gb_per_s is not None and network_speed < checks.network_gb_per_s:
            over_all = over_all or f"reaches {network_speed:.3g} GB/s, {checks.network_gb_per_s:g} are required"
    if over_all:
        report.together = f"all-reduce of all nodes: {over_all}"


def wrong_sums(fault_of: list[str], node_of: list[str]) -> str:
    """Name the first rank with a wrong sum, and count such ranks; return an empty text if all sums are right.

    The lists hold each rank's fault, which is empty if there is none, and its node.
    """
    ranks = [rank for rank, fault in enumerate(fault_of) if fault]
    if not ranks:
        return ""
    count = f" ({len(ranks)} ranks in all)" if len(ranks) > 1 else ""
    return f"rank {ranks[0]} on {node_of[ranks[0]]} {fault_of[ranks[0]]}{count}"


def bandwidth(tensor: Any, group: Any) -> tuple[float | None, str]:
    """Measure an all-reduce: return its bus bandwidth in GB/s, and a fault if any sum was wrong.

    The bandwidth of a group with a single rank is None.
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
            fault = f"gets another sum of {size} ones than {size}: memory or links are broken"
    return 2 * (size - 1) / size * tensor.numel() * tensor.element_size() / min(times) / 1e9, fault


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
