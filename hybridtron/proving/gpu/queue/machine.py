"""Measures the machine: other load, settings that serialize launches, and upper bounds for other parts' speeds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import torch

from hybridtron.device import compute_device
from hybridtron.ops.kernel_compiled import compiler_key
from hybridtron.proving.gpu.queue.rows import Recorder
from hybridtron.proving.measuring import processor, time_in_turns

QUERIES = {
    "gpu": "--query-gpu=name,driver_version,pstate,clocks.sm,clocks.mem,power.draw,power.limit,utilization.gpu",
    "processes": "--query-compute-apps=pid,used_memory",
}
# An environment variable is recorded if its name begins with one of these texts.
SETTINGS = ("CUDA_", "TORCH", "PYTORCH_", "TRITON_", "NVIDIA_", "CUBLAS_", "OMP_")
COPIED = 2**31  # bytes in the copy that is timed
LAUNCHES = 2000  # number of tiny kernels whose launches are timed
PRODUCTS = ((8192, 8192, 8192), (8192, 2048, 8192), (8192, 64, 2048), (8192, 256, 2048))
"""Sizes m, n and k of four matrix products (m, k) x (k, n).

The first product shows the highest speed that a matrix product can reach. The second has the sizes of a projection. The
last two are narrow, with few output channels.
"""


def machine(record: Recorder) -> None:
    """Record each measurement as a separate case, so that a failure loses only one case."""
    device = compute_device()
    with record.case("host") as row:
        row |= {"cpus": os.cpu_count(), "usable": len(os.sched_getaffinity(0)), "processor": processor()}
        row |= {"load": os.getloadavg()[0], "threads": torch.get_num_threads()}
        row["settings"] = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    for name, query in QUERIES.items():
        with record.case(name) as row:
            row["lines"] = query_gpu(query)
            row["own"] = str([os.getpid(), os.getppid()])  # ids of our processes; all other processes are other load
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
    """Return how many seconds the fastest call takes among `rounds` calls, after a warm-up."""
    return time_in_turns({"": call}, rounds)[""].fastest


def query_gpu(query: str) -> list[str]:
    """Return the lines that nvidia-smi prints for a query. Queries change no settings of the GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ["no nvidia-smi"]
    process = subprocess.run(
        [program, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=15, check=False
    )
    return (process.stdout or process.stderr).strip().splitlines()
