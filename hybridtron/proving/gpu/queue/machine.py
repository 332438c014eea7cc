"""Measures the machine: other load on it, settings that serialize launches, and upper bounds for other numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import torch

from hybridtron.device import compute_device
from hybridtron.ops.kernel_compiled import compiler_key
from hybridtron.proving.gpu.queue.rows import Recorder
from hybridtron.proving.measuring import interleaved, processor

QUERIES = {
    "gpu": "--query-gpu=name,driver_version,pstate,clocks.sm,clocks.mem,power.draw,power.limit,utilization.gpu",
    "processes": "--query-compute-apps=pid,used_memory",
}
SETTINGS = ("CUDA_", "TORCH", "PYTORCH_", "TRITON_", "NVIDIA_", "CUBLAS_", "OMP_")
COPIED = 2**31  # bytes
LAUNCHES = 2000
PRODUCTS = ((8192, 8192, 8192), (8192, 2048, 8192), (8192, 64, 2048), (8192, 256, 2048))
"""m, n, k: an upper bound, a projection, and the products of a projection that is cut into parts."""


def machine(record: Recorder) -> None:
    """Record each case separately: a missing program loses only its own row."""
    device = compute_device()
    with record.case("host") as row:
        row |= {"cpus": os.cpu_count(), "usable": len(os.sched_getaffinity(0)), "processor": processor()}
        row |= {"load": os.getloadavg()[0], "threads": torch.get_num_threads()}
        row["settings"] = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    for name, query in QUERIES.items():
        with record.case(name) as row:
            row["lines"] = asked(query)
            row["own"] = str([os.getpid(), os.getppid()])  # our processes, to distinguish them from others
    with record.case("compiler") as row:
        row["key"] = compiler_key()
        row["as in the carried cache"] = row["key"] == record.modelled.get("compiler")
    with record.case("copy") as row:
        size = 2**20 if record.tiny else COPIED
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty(size, dtype=torch.uint8, device=device)
        row["tb_s"] = 2 * size / fastest(lambda: target.copy_(source)) / 1e12
    for m, n, k in PRODUCTS:
        with record.case(f"product {m}x{n}x{k}") as row:
            if record.tiny:
                m = min(m, 64)
                n = min(n, 64)
                k = min(k, 64)
            a_MK, b_KN = torch.randn(m, k, device=device).bfloat16(), torch.randn(k, n, device=device).bfloat16()
            row["tflops"] = 2 * m * n * k / fastest(lambda a=a_MK, b=b_KN: a @ b) / 1e12
    with record.case("launches") as row:
        number = torch.zeros(1, device=device)
        count = 20 if record.tiny else LAUNCHES
        row["us"] = 1e6 * fastest(lambda: [number.add_(1.0) for _ in range(count)]) / count


def fastest(call: Callable[[], object], rounds: int = 10) -> float:
    """Return the seconds of the fastest round, after one warm-up."""
    return interleaved({"": call}, rounds)[""].fastest


def asked(query: str) -> list[str]:
    """Return nvidia-smi's answer to a query, as lines. The query changes no setting."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ["no nvidia-smi"]
    process = subprocess.run(
        [program, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=15, check=False
    )
    return (process.stdout or process.stderr).strip().splitlines()
