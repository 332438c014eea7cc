"""What Python code asks of torch.cuda, answered as a machine with one GPU would, though there is none.

Together with the library of `guard` and torch's fake tensors, whose values do not exist, the code of a training step
runs as it would on that GPU, and computes nothing. All of this holds until the process ends.

Waits of the host and of streams are reported to the rehearsal under way (`heard`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hybridtron.planning.rates import GPU
from hybridtron.rehearse.attention_work import attend
from hybridtron.rehearse.heard import arrived, copied, waits


class AbsentStream:
    """A stream, or an event: all its work is done."""

    cuda_stream = 0
    copies = range(0)  # that were asked for on it the last time

    def __init__(self, *_: Any, priority: int = 0, enable_timing: bool = False) -> None: ...

    def wait_stream(self, other: Any) -> None:
        waits("stream")
        arrived(other.copies)

    def wait_event(self, _: Any) -> None:
        waits("stream")

    def wait(self, *_: Any) -> None:
        waits("stream")

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> AbsentStream:
        return AbsentStream()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        waits("event or stream")

    def __enter__(self) -> AbsentStream:
        return self

    def __exit__(self, *_: object) -> None: ...


class OnStream:
    """What `torch.cuda.stream` gives: inside, this stream is asked."""

    def __init__(self, stream: AbsentStream) -> None:
        self.stream = stream
        self.first = 0

    def __enter__(self) -> None:
        self.first = copied()

    def __exit__(self, *_: object) -> None:
        self.stream.copies = range(self.first, copied())


def pretend(library: ctypes.CDLL, gpu: GPU) -> None:
    """From here on torch sees one GPU of this kind."""
    library.take_the_guard()
    torch._C._set_only_lift_cpu_tensors(True)
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda *_: f"no GPU, as {gpu.name}"
    cuda.get_device_capability = lambda *_: gpu.capability
    cuda.synchronize = lambda *_: waits("device")
    cuda.is_current_stream_capturing = lambda: False
    cuda.max_memory_allocated = cuda.memory_allocated = lambda *_: 0
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    for name in ("_lazy_init", "empty_cache", "manual_seed", "reset_peak_memory_stats", "set_device", "set_rng_state"):
        setattr(cuda, name, lambda *_: None)
    names: Any = torch
    names.Generator = AbsentGenerator
    kept: Any = fake_tensor
    kept.init_gpu_context = lambda _: None  # which would make a tensor on the device
    fake: Any = FakeTensor
    fake.tolist = _values
    cuda.Stream = cuda.Event = AbsentStream
    cuda.current_stream = cuda.default_stream = lambda *_: AbsentStream()
    cuda.stream = lambda stream: OnStream(stream or AbsentStream())
    _register_kernels()


COMPOSITE = ("mish_backward", "native_channel_shuffle", "silu_backward")
"""Operations with a kernel of their own on a GPU, which a build without CUDA would take apart into smaller ones."""
_library_of_kernels: list[torch.library.Library] = []


def _register_kernels() -> None:
    """Let torch know that a GPU has kernels of its own; with fake tensors they are never called."""
    registered = torch.library.Library("aten", "IMPL")
    for name in COMPOSITE:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            registered.impl(name, _never_called, "CUDA")
    _library_of_kernels.append(registered)  # as long as it lives they are registered


def _never_called(*_: Any) -> Tensor:
    raise AssertionError("a kernel ran in a rehearsal")


class AbsentGenerator(torch.Generator):
    """Of random numbers on any device."""

    def __new__(cls, device: Any = "cpu") -> AbsentGenerator:
        return super().__new__(cls)


class ValuesOfNobody(TorchFunctionMode):
    """Answers questions for values, which fake tensors do not have; each is a wait of the host for its device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            args = (_plain(args[0]),)  # tensors among the values are read one by one
            if torch.device(kwargs.get("device") or "cpu").type == "cuda":
                return _copied_in(args[0], kwargs.get("dtype"))
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}  # it is one of the CPU, and nothing is drawn
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and args[0].numel() == 1 and _names_gpu((*args[1:], *kwargs.values())):
            args[0].constant = None  # the mode knows the value of one number, and would copy it there
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is functional.scaled_dot_product_attention and args[0].is_cuda and kwargs.get("is_causal"):
            return _attended(*args[:3])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and args[0].is_cuda:
            return TYPE_NAMES[args[0].dtype]
        return func(*args, **kwargs)


def _attended(q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor) -> Tensor:
    """torch's own attention, causal, as the one kernel that a GPU has for it; a build without CUDA makes all scores."""
    q, k, v = (x.transpose(1, 2) for x in (q_BHLK, k_BGLK, v_BGLK))
    return attend("flash", q, k, v, causal=True, before=-1).transpose(1, 2)


TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.DoubleTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.int64: "torch.cuda.LongTensor",
    torch.int32: "torch.cuda.IntTensor",
    torch.bool: "torch.cuda.BoolTensor",
}


def _names_gpu(arguments: Sequence[Any]) -> bool:
    """Whether these arguments of `Tensor.to` name a GPU."""
    return any(isinstance(one, torch.device | str) and torch.device(one).type == "cuda" for one in arguments)


def _values(tensor: Tensor) -> Any:
    """Of `tolist`: one copy to the host."""
    if tensor.is_cuda:
        waits("tolist")
    return _ones(tensor.shape, 1.0 if tensor.dtype.is_floating_point else 1)


def _ones(shape: Sequence[int], one: float) -> Any:
    """A list of ones in lists."""
    if len(shape):
        return [_ones(shape[1:], one) for _ in range(shape[0])]
    return one


def _copied_in(values: Any, dtype: torch.dtype | None) -> Tensor:
    """`torch.tensor(values, device="cuda")`: the host waits for the copy."""
    waits("copy to the device")
    if dtype is None:
        found = torch.from_numpy(numpy.asarray(values)).dtype
    else:
        found = dtype
    if dtype is None and found == torch.float64:
        narrow = torch.float32
    else:
        narrow = found
    return torch.empty(numpy.shape(values), dtype=narrow, device="cuda")


def _plain(values: Any) -> Any:
    if isinstance(values, Tensor):
        if values.dim() == 0:
            return values.item()
        return values.tolist()
    if isinstance(values, list | tuple):
        return [_plain(value) for value in values]
    return values


def fake_tensors() -> FakeTensorMode:
    """The mode in which tensors have shapes and no values; real ones on the CPU may take part."""
    return FakeTensorMode(allow_non_fake_inputs=True)
