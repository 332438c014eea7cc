"""The one place that knows the device: CPU or CUDA, data types, random state, memory, optional packages.

Nothing else in the package names `torch.cuda`. Code elsewhere asks for the device once and hands tensors along.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16} | dict.fromkeys(
    ("fp8_delayed", "fp8_current", "fp8_block"), torch.bfloat16
)
"""Of weights and activations, by precision: FP8 exists inside products alone."""

FP8_CAPABILITY = (9, 0)  # compute capability: Hopper


@functools.cache
def compute_device() -> torch.device:
    """The accelerator of this process, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_index(os.environ, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def device_index(environment: Mapping[str, str], visible: int) -> int:
    """Which of the visible devices is this process's, by what torchrun or srun says of its place on the machine."""
    # SLURM can show each process its own devices alone, whatever its place
    return int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))) % visible


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none of them is touched."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else list(map(str, range(torch.cuda.device_count())))


def describe_device() -> str:
    """One line for the start-up table: `CPU, 2 threads` or `NVIDIA H100 80GB HBM3, CUDA 13.0`."""
    if compute_device().type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads (torch {torch.__version__} sees no CUDA device)"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def fp8_device_fault() -> str | None:
    """Why this process's device can't multiply in FP8; None where it can."""
    if compute_device().type == "cpu":
        return f"torch {torch.__version__} sees no CUDA device"
    capability = compute_capability()
    if capability is None or capability >= FP8_CAPABILITY:
        return None
    version = ".".join(map(str, capability))
    return f"{torch.cuda.get_device_name()} has compute capability {version}, FP8 starts at 9.0"


def compute_capability() -> tuple[int, int] | None:
    """Of the CUDA device; None without one."""
    return None if compute_device().type == "cpu" else torch.cuda.get_device_capability()


def cuda_report() -> dict[str, str]:
    """What torch says about CUDA, for people: its build, and each device; one line where there is none to use."""
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
    """Wait for the device, so that a clock read next means something."""
    if compute_device().type == "cuda":
        torch.cuda.synchronize()


class Movable(Protocol):
    """Something made of tensors that can move together."""

    def moved(self, move: Callable[[Tensor], Tensor], /) -> Self: ...


Moved = TypeVar("Moved", bound=Movable)


def copied_ahead(steps: Iterable[list[Moved]]) -> Iterator[list[Moved]]:
    """The batches of each step on the device; on CUDA the next step's are copied while this one's are computed.

    The copies run on a stream of their own. What they wrote is handed over by an event, and marked as used by the
    computing stream, so that its memory is not given away before that stream is done with it.
    """
    if compute_device().type == "cpu":
        yield from steps
        return
    copying, computing = torch.cuda.Stream(), torch.cuda.current_stream()

    def pinned_and_copied(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(compute_device(), non_blocking=True)

    def copied(step: list[Moved]) -> list[Moved]:
        with torch.cuda.stream(copying):
            return [batch.moved(pinned_and_copied) for batch in step]

    def handed_over(tensor: Tensor) -> Tensor:
        tensor.record_stream(computing)
        return tensor

    ahead: list[Moved] | None = None
    for step in itertools.chain(steps, [None]):
        current, ahead = ahead, None if step is None else copied(step)
        if current is not None:
            yield current
        if ahead is not None:
            computing.wait_stream(copying)
            ahead = [batch.moved(handed_over) for batch in ahead]


def beside_computing() -> AbstractContextManager[Any]:
    """Inside, copies from the device run beside what it computes, and after all that it was asked for by now."""
    if compute_device().type == "cpu":
        return nullcontext()
    (copying := torch.cuda.Stream()).wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(copying)


def wait_for(copies: Any) -> None:
    """What is computed from now on waits for what was copied inside of this `beside_computing`."""
    if compute_device().type == "cuda":
        torch.cuda.current_stream().wait_stream(copies.stream)


def graph_of(call: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of what a call asks of the device, as a function that replays it. CUDA only.

    The call is made once before, on a stream of its own as torch's notes on graphs want it, and must not wait for the
    device. Raises torch's error where something in it can't be captured; the process should then capture nothing else.
    """
    torch.cuda.empty_cache()  # a graph has memory of its own
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        call()
    torch.cuda.current_stream().wait_stream(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # autograd's thread asks for memory meanwhile
        call()
    return graph.replay


def peak_memory_gib() -> float | None:
    """Most memory that tensors held on the device so far, in GiB; None where the device does not count it."""
    return None if compute_device().type == "cpu" else torch.cuda.max_memory_allocated() / 2**30


def forget_peak_memory() -> None:
    """Let `peak_memory_gib` count from now on."""
    if compute_device().type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def random_states() -> dict[str, Tensor]:
    """The state of torch's own generators, for a checkpoint."""
    on_device = {"cuda": torch.cuda.get_rng_state()} if compute_device().type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **on_device}


def set_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and compute_device().type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])


def warn_of_waits(enabled: bool) -> None:
    """Let torch warn wherever it makes the host wait for the device. CUDA only."""
    torch.cuda.set_sync_debug_mode("warn" if enabled else "default")


def record_memory_history(enabled: bool) -> None:
    """Start or stop recording allocations, for a memory snapshot of profiled steps. CUDA only."""
    torch.cuda.memory._record_memory_history(enabled="all" if enabled else None)


def dump_memory_snapshot(path: str) -> None:
    torch.cuda.memory._dump_snapshot(path)


@dataclass(frozen=True)
class Package:
    """An optional package as this process finds it: the module, or the reason why there is none."""

    name: str
    module: ModuleType | None
    reason: str


@functools.cache
def optional_package(name: str) -> Package:
    """Import an optional package, or learn why that fails. Only the file that owns a package may ask for it."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return Package(name, None, "not installed")
    try:
        return Package(name, importlib.import_module(name), "installed")
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            return Package(name, None, f"not installed, though there is a {name.partition('.')[0]}")
        return Package(name, None, f"does not import: {error}")
    except Exception as error:  # a broken compiled extension can raise anything at import
        return Package(name, None, f"does not import: {type(error).__name__}: {error}".splitlines()[0])


class _OnCPU(TorchFunctionMode):
    """Makes Megatron's calls that name CUDA mean the CPU: `device="cuda"`, `.cuda()`, and `.type()`.

    Its optimizers ask for `torch.cuda.FloatTensor` by name, so `.type()` answers in these words.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every call of torch passes here, so this must be quick.
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            device = kwargs.get("device")
            if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
                kwargs = {**kwargs, "device": torch.device("cpu")}
            return func(*args, **kwargs)
        out = func(*args)
        return out.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else out


def megatron_context() -> AbstractContextManager[Any]:
    """The context in which megatron-core is built and run: nothing on CUDA, its stand-ins on the CPU."""
    if compute_device().type == "cuda":
        return nullcontext()
    _stand_in_for_cuda()
    return _OnCPU()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside, calls of torch skip Megatron's context: for our own forward and backward passes, which name no CUDA.

    On a CPU that context costs each call a few microseconds, which was a third of a small model's step.
    """
    with nullcontext() if compute_device().type == "cuda" else torch._C.DisableTorchFunction():
        yield


@functools.cache
def _stand_in_for_cuda() -> None:
    """The functions of torch.cuda that megatron-core calls whatever the device, in their CPU form."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.synchronize = lambda *_: None
    cuda.current_stream = torch.cpu.current_stream  # from 0.19 on, before gradients are reduced
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    schedules.backward_step = plain_torch()(schedules.backward_step)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
