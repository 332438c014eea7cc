"""Device access: CPU or CUDA, data types, random state, memory, optional packages.

No other file of the package uses `torch.cuda`. Other code gets the device from `compute_device`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridtron.problems import first_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16} | dict.fromkeys(
    ("fp8_delayed", "fp8_current", "fp8_block"), torch.bfloat16
)
"""Data types of weights and activations by `precision`. With FP8 they are bf16, and only matmuls run in FP8."""

FP8_CAPABILITY = (9, 0)  # minimum compute capability: Hopper


@functools.cache
def compute_device() -> torch.device:
    """Return this process's GPU, or the CPU if torch finds no GPU. The first call makes the GPU the current device.

    The first call also turns cuDNN off in torch's scaled_dot_product_attention. By default torch prefers cuDNN on
    Hopper and Blackwell, also where `ops/attention/table.py` rules it out. The table's row `cudnn` turns it on.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_index(os.environ, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def device_index(environment: Mapping[str, str], visible: int) -> int:
    """Return the index of this process's GPU from its local rank, as torchrun or srun sets it."""
    # modulo, since SLURM may make only one GPU visible to each process, whatever its local rank
    return int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))) % visible


def visible_gpus() -> list[str]:
    """Return this process's GPUs as CUDA_VISIBLE_DEVICES names them, without initialising CUDA."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return list(map(str, range(torch.cuda.device_count())))


def describe_device() -> str:
    """Describe the device on one line: `CPU, 2 threads ...` or `NVIDIA H100 80GB HBM3, CUDA 13.0`."""
    if compute_device().type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads (torch {torch.__version__} sees no CUDA device)"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def fp8_device_fault() -> str | None:
    """Return the reason why this process's device can't run matmuls in FP8, or None if it can."""
    if compute_device().type == "cpu":
        return f"torch {torch.__version__} sees no CUDA device"
    capability = compute_capability()
    if capability is None or capability >= FP8_CAPABILITY:
        return None
    version = ".".join(map(str, capability))
    return f"{torch.cuda.get_device_name()} has compute capability {version}, FP8 starts at 9.0"


def compute_capability() -> tuple[int, int] | None:
    """Return the CUDA device's compute capability, such as (9, 0); None without a CUDA device."""
    if compute_device().type == "cpu":
        return None
    return torch.cuda.get_device_capability()


def cudnn_version() -> tuple[int, int, int] | None:
    """Return the version of the cuDNN that torch has loaded, such as (9, 19, 0); None without cuDNN."""
    number = torch.backends.cudnn.version()
    if number is None:
        return None
    return number // 10_000, number // 100 % 100, number % 100


def cuda_report() -> dict[str, str]:
    """Return a report on CUDA as {label: text}: torch's build, NCCL, and each GPU."""
    if torch.version.cuda is None:
        return {"torch": "built without CUDA"}
    report = {"torch": f"built for CUDA {torch.version.cuda}"}
    if not torch.cuda.is_available():
        return {**report, "CUDA": "no device that this build can use (nvidia-smi lists devices and driver)"}
    if torch.distributed.is_nccl_available():
        report["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        numbers = f"{gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        report[f"cuda:{index}"] = f"{gpu.name}, compute capability {numbers}"
    return report


def synchronize() -> None:
    """Wait for the GPU to finish, so that a clock can be read. Does nothing on a CPU."""
    if compute_device().type == "cuda":
        torch.cuda.synchronize()


class Stopwatch:
    """Measures the time between two points in the device's work. Neither point makes the host wait for the device."""

    def __init__(self) -> None:
        if compute_device().type == "cuda":
            self._events: tuple[Any, Any] | None = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
        else:
            self._events = None
        self._times = [0.0, 0.0]

    def start(self) -> None:
        """Mark the first point."""
        self._mark(0)

    def stop(self) -> None:
        """Mark the second point."""
        self._mark(1)

    def seconds(self) -> float:
        """Return the time between the points. On a GPU, the host must have waited for both before."""
        if self._events is None:
            return self._times[1] - self._times[0]
        began, ended = self._events
        return began.elapsed_time(ended) / 1000

    def _mark(self, point: int) -> None:
        if self._events is None:
            self._times[point] = time.perf_counter()
        else:
            self._events[point].record()


def copied_to_device(tensor: Tensor) -> Tensor:
    """Return a copy of a CPU tensor on the device, without waiting for it. On a CPU, return the tensor itself."""
    if compute_device().type == "cpu":
        return tensor
    return tensor.pin_memory().to(compute_device(), non_blocking=True)


def host_memory_for(tensor: Tensor) -> Tensor:
    """Return CPU memory for copies of a tensor. On CUDA it is pinned, so that the GPU copies at the bus's full rate.

    torch rounds the size of pinned memory up to a power of two.
    """
    pinned = compute_device().type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)


class Movable(Protocol):
    """A value that holds tensors and can move all of them, such as a batch."""

    def moved(self, move: Callable[[Tensor], Tensor], /) -> Self:
        """Return a copy with `move` applied to every tensor."""
        ...


Moved = TypeVar("Moved", bound=Movable)


def copied_ahead(steps: Iterable[list[Moved]]) -> Iterator[list[Moved]]:
    """Yield each step's batches on the device. On CUDA, the next step's batches are copied during a step's computation.

    The copies run on a separate CUDA stream, and the stream that computes waits for the copies. The copied tensors are
    recorded on the stream that computes, so that the allocator does not reuse their memory while this stream may still
    read it.
    """
    if compute_device().type == "cpu":
        yield from steps
        return
    copying, computing = torch.cuda.Stream(), torch.cuda.current_stream()

    def copied(step: list[Moved]) -> list[Moved]:
        with torch.cuda.stream(copying):
            return [batch.moved(copied_to_device) for batch in step]

    def handed_over(tensor: Tensor) -> Tensor:
        tensor.record_stream(computing)
        return tensor

    ahead: list[Moved] | None = None
    for step in itertools.chain(steps, [None]):
        current = ahead
        ahead = None if step is None else copied(step)
        if current is not None:
            yield current
        if ahead is not None:
            computing.wait_stream(copying)
            ahead = [batch.moved(handed_over) for batch in ahead]


def beside_computing() -> AbstractContextManager[Any]:
    """Return a context in which copies from the GPU overlap with its computation.

    The copies run on a separate CUDA stream, after all work that is queued so far. Before using the copies, pass the
    context to `wait_for`. On a CPU the context does nothing.
    """
    if compute_device().type == "cpu":
        return nullcontext()
    (copying := torch.cuda.Stream()).wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(copying)


def wait_for(copies: Any) -> None:
    """Make later computation on the GPU wait for the copies that were made inside a `beside_computing` context."""
    if compute_device().type == "cuda":
        torch.cuda.current_stream().wait_stream(copies.stream)


def graph_of(call: Callable[[], object]) -> Callable[[], None]:
    """Capture a call as a CUDA graph and return a function that replays it. CUDA only.

    The call first runs once on a side stream, as torch's notes on graphs require. The call must not synchronize with
    the GPU. Raises torch's error if an operation can't be captured; the process should then not try to capture a graph
    again.
    """
    torch.cuda.empty_cache()  # a graph allocates from a memory pool of its own
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        call()
    torch.cuda.current_stream().wait_stream(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # autograd's thread may allocate meanwhile
        call()
    return graph.replay


@functools.cache
def _graph_stream() -> Any:
    """Return the stream for captures, and for the passes before a capture."""
    return torch.cuda.Stream()


@contextmanager
def on_graph_stream(enabled: bool = True) -> Iterator[None]:
    """Run the block on the stream for CUDA graphs, in order with the work before and after it. No effect on a CPU.

    Megatron's gradient buffers must be made on this stream if the passes will be captured: autograd adds gradients on
    the stream on which it first saw the weight, and torch's default stream can't take part in a capture.
    """
    if not enabled or compute_device().type == "cpu":
        yield
        return
    outer = torch.cuda.current_stream()
    _graph_stream().wait_stream(outer)
    with torch.cuda.stream(_graph_stream()):
        yield
    outer.wait_stream(_graph_stream())


@dataclass
class GraphMemory:
    """A memory pool for several captured calls. Only one of them may run at a time, and none may return a tensor.

    pool: None before the first capture
    """

    pool: Any = None


def captured(call: Callable[[], object], memory: GraphMemory) -> Callable[[], None]:
    """Capture a call as a CUDA graph, without running it, and return a function that replays it. CUDA only.

    The call must have run before, inside `on_graph_stream`, and must not wait for the GPU. Raises torch's error if an
    operation can't be captured; the process may then be unable to compute.
    """
    graph = torch.cuda.CUDAGraph()
    # thread_local: autograd's thread, and other threads that copy, may allocate meanwhile
    with torch.cuda.graph(graph, pool=memory.pool, stream=_graph_stream(), capture_error_mode="thread_local"):
        call()
    memory.pool = graph.pool()
    return graph.replay


def peak_memory_gib() -> float | None:
    """Return the peak memory of tensors on the GPU in GiB, since the last `forget_peak_memory` or the process's start.

    Returns None on a CPU, where torch does not count it.
    """
    if compute_device().type == "cpu":
        return None
    return torch.cuda.max_memory_allocated() / 2**30


def free_memory_gib() -> float | None:
    """Return the GPU's memory in GiB beyond the peak of tensors so far; None on a CPU."""
    peak = peak_memory_gib()
    if peak is None:
        return None
    return torch.cuda.get_device_properties(compute_device()).total_memory / 2**30 - peak


def forget_peak_memory() -> None:
    """Reset the peak that `peak_memory_gib` returns, and free the allocator's cache."""
    if compute_device().type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def random_states() -> dict[str, Tensor]:
    """Return the states of torch's random generators by device, for a checkpoint."""
    if compute_device().type == "cuda":
        on_device = {"cuda": torch.cuda.get_rng_state()}
    else:
        on_device = {}
    return {"cpu": torch.get_rng_state(), **on_device}


def set_random_states(states: dict[str, Tensor]) -> None:
    """Restore the states that `random_states` has returned. A GPU's state is ignored on a CPU."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and compute_device().type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])


def warn_of_waits(enabled: bool) -> None:
    """Turn torch's warnings at each synchronization of host and GPU on or off. CUDA only."""
    torch.cuda.set_sync_debug_mode("warn" if enabled else "default")


def record_memory_history(enabled: bool) -> None:
    """Start or stop recording allocations, for a memory snapshot of profiled steps. CUDA only."""
    torch.cuda.memory._record_memory_history(enabled="all" if enabled else None)


def dump_memory_snapshot(path: str) -> None:
    """Write the recorded allocations to a pickle file for torch's memory viewer. CUDA only."""
    torch.cuda.memory._dump_snapshot(path)


@dataclass(frozen=True)
class Package:
    """An optional package: its module, or None if the import fails.

    `reason` says why the import fails; it is `installed` if the import succeeds.
    """

    name: str
    module: ModuleType | None
    reason: str


@functools.cache
def optional_package(name: str) -> Package:
    """Try to import an optional package, and return its module or the reason why the import fails.

    Each optional package is imported in one file of this project only; other files import that file.
    """
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return Package(name, None, "not installed")
    try:
        return Package(name, importlib.import_module(name), "installed")
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            return Package(name, None, f"not installed, though there is a {name.partition('.')[0]}")
        return Package(name, None, f"does not import: {error}")
    except Exception as error:  # a broken compiled extension can raise anything at import
        return Package(name, None, f"does not import: {first_line(error)}")


class _OnCPU(TorchFunctionMode):
    """Redirects megatron-core's CUDA calls to the CPU: `device="cuda"`, `.cuda()` and `.type()`.

    Megatron's optimizers compare `.type()` with names such as `torch.cuda.FloatTensor`, so `.type()` returns such names
    for CPU tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every call of torch goes through this function, so it must be fast.
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            device = kwargs.get("device")
            if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
                kwargs = {**kwargs, "device": torch.device("cpu")}
            return func(*args, **kwargs)
        out = func(*args)
        if func is torch.Tensor.type and len(args) == 1:
            return out.replace("torch.", "torch.cuda.")
        return out


def megatron_context() -> AbstractContextManager[Any]:
    """Return the context in which megatron-core runs. On a CPU it replaces CUDA calls; on CUDA it does nothing."""
    if compute_device().type == "cuda":
        return nullcontext()
    _stand_in_for_cuda()
    return _OnCPU()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Disable the context of `megatron_context` in the block, for forward and backward passes of this package.

    These passes never name CUDA, so they do not need the context. On a CPU the context costs a few microseconds at each
    torch call. These costs added up to a third of a small model's step time.
    """
    with nullcontext() if compute_device().type == "cuda" else torch._C.DisableTorchFunction():
        yield


@functools.cache
def _stand_in_for_cuda() -> None:
    """Replace functions of torch.cuda by CPU versions in this process: megatron-core calls them even on a CPU."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.synchronize = lambda *_: None
    cuda.current_stream = torch.cpu.current_stream  # called by megatron-core from 0.19 on, before it reduces gradients
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    schedules.backward_step = plain_torch()(schedules.backward_step)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
