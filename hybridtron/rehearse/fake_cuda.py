"""Replacements for torch.cuda's Python functions, so that this process appears to have one GPU.

A rehearsal runs the code of a training step on a simulated GPU, without computing anything. Three parts make
this possible: the replacements in this file, the C++ library of `fake_cuda_shim`, and torch's fake tensors, which have
shapes without values. The replacements stay in place until the process ends.

On a real GPU, the host or a stream would sometimes wait. Each such wait is reported to the rehearsal (`events`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hybridtron.planning.rates import GPU
from hybridtron.rehearse.attention_cost import attend
from hybridtron.rehearse.events import count_copies, report_arrival, report_wait


class FakeStream:
    """A simulated CUDA stream or event whose work is always complete. Waits are reported to the rehearsal."""

    cuda_stream = 0
    # host-device copies in the last block `with torch.cuda.stream(self)`, as indices in `Census.copies`
    copies = range(0)

    def __init__(self, *_: Any, priority: int = 0, enable_timing: bool = False) -> None: ...

    def wait_stream(self, other: Any) -> None:
        report_wait("stream")
        report_arrival(other.copies)

    def wait_event(self, _: Any) -> None:
        report_wait("stream")

    def wait(self, *_: Any) -> None:
        report_wait("stream")

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> FakeStream:
        return FakeStream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        report_wait("event or stream")

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None: ...


class StreamContext:
    """Replacement for `torch.cuda.stream(stream)`. On exit, `stream.copies` gets the indices of the new copies."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.first = 0

    def __enter__(self) -> None:
        self.first = count_copies()

    def __exit__(self, *_: object) -> None:
        self.stream.copies = range(self.first, count_copies())


def pretend(library: ctypes.CDLL, gpu: GPU) -> None:
    """Make torch report one GPU of the kind `gpu`, until the process ends."""
    library.install_guard()
    torch._C._set_only_lift_cpu_tensors(True)
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda *_: f"no GPU, as {gpu.name}"
    cuda.get_device_capability = lambda *_: gpu.capability
    cuda.synchronize = lambda *_: report_wait("device")
    cuda.is_current_stream_capturing = lambda: False
    cuda.max_memory_allocated = cuda.memory_allocated = lambda *_: 0
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    for name in ("_lazy_init", "empty_cache", "manual_seed", "reset_peak_memory_stats", "set_device", "set_rng_state"):
        setattr(cuda, name, lambda *_: None)
    cudnn: Any = torch.backends.cudnn
    cudnn.version = lambda: None  # cuDNN's attention has no simulated kernel
    torch_module: Any = torch
    torch_module.Generator = FakeGenerator
    fake_module: Any = fake_tensor
    fake_module.init_gpu_context = lambda _: None  # the original creates a tensor on the device
    fake_class: Any = FakeTensor
    fake_class.tolist = _values
    cuda.Stream = cuda.Event = FakeStream
    cuda.current_stream = cuda.default_stream = lambda *_: FakeStream()
    cuda.stream = lambda stream: StreamContext(stream or FakeStream())
    _register_kernels()


def pretend_properties(gpu: GPU, shared: int) -> None:
    """Make torch.cuda report this GPU's properties to other packages' Triton code, until the process ends.

    `shared` is the shared memory that a program may use, in bytes.
    """
    cuda: Any = torch.cuda
    cuda.device = cuda.device_of = lambda *_: nullcontext()
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.processors,
        total_memory=int(gpu.memory),
        shared_memory_per_block_optin=shared,
    )


COMPOSITE = ("mish_backward", "native_channel_shuffle", "silu_backward")
"""Operations with their own kernel on a GPU. A build of torch without CUDA would split them into smaller operations."""
_library_of_kernels: list[torch.library.Library] = []


def _register_kernels() -> None:
    """Register placeholders as CUDA kernels for the operations in COMPOSITE. Fake tensors never call them."""
    library = torch.library.Library("aten", "IMPL")
    for name in COMPOSITE:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _never_called, "CUDA")
    _library_of_kernels.append(library)  # the kernels stay registered as long as `library` exists


def _never_called(*_: Any) -> Tensor:
    raise AssertionError("a placeholder kernel was called: rehearse with fake tensors only")


class FakeGenerator(torch.Generator):
    """A random number generator on the CPU, whatever device is requested."""

    def __new__(cls, device: Any = "cpu") -> FakeGenerator:
        return super().__new__(cls)


class PlaceholderValues(TorchFunctionMode):
    """Function mode for calls that need a tensor's values or a real GPU.

    - `torch.tensor(values, device="cuda")` returns an uninitialized tensor.
    - Arguments for generators and pinned memory are dropped.
    - torch's causal attention counts as one FlashAttention kernel.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            args = (_plain(args[0]),)  # read the values of tensors inside nested lists
            if torch.device(kwargs.get("device") or "cpu").type == "cuda":
                return _copied_in(args[0], kwargs.get("dtype"))
        if kwargs.get("generator") is not None:  # every generator is on the CPU, and GPU operations refuse it
            kwargs = {**kwargs, "generator": None}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and args[0].numel() == 1 and _names_gpu((*args[1:], *kwargs.values())):
            args[0].constant = None  # if `constant` has a value, the fake mode would copy it to the device
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is functional.scaled_dot_product_attention and args[0].is_cuda and kwargs.get("is_causal"):
            return _attended(*args[:3])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and args[0].is_cuda:
            return TYPE_NAMES[args[0].dtype]
        return func(*args, **kwargs)


def _attended(q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor) -> Tensor:
    """Count torch's causal attention as one kernel, as on a GPU.

    A build of torch without CUDA would compute the attention by several operations, with a matrix of all scores. Axes:
    B sequences, H query heads, G key/value heads, L tokens, K channels per head.
    """
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
    """Return True if an argument of `Tensor.to` names a GPU."""
    return any(
        isinstance(argument, torch.device | str) and torch.device(argument).type == "cuda" for argument in arguments
    )


def _values(tensor: Tensor) -> Any:
    """Replace `Tensor.tolist`: return nested lists of ones, and report a wait if the tensor is on the device."""
    if tensor.is_cuda:
        report_wait("tolist")
    return _ones(tensor.shape, 1.0 if tensor.dtype.is_floating_point else 1)


def _ones(shape: Sequence[int], value: float) -> Any:
    """Return nested lists of this shape, filled with `value`."""
    if len(shape):
        return [_ones(shape[1:], value) for _ in range(shape[0])]
    return value


def _copied_in(values: Any, dtype: torch.dtype | None) -> Tensor:
    """Replace `torch.tensor(values, device="cuda")`: report a wait for the copy, and return an uninitialized tensor."""
    report_wait("copy to the device")
    if dtype is None:
        source_dtype = torch.from_numpy(numpy.asarray(values)).dtype
    else:
        source_dtype = dtype
    if dtype is None and source_dtype == torch.float64:
        device_dtype = torch.float32
    else:
        device_dtype = source_dtype
    return torch.empty(numpy.shape(values), dtype=device_dtype, device="cuda")


def _plain(values: Any) -> Any:
    """Replace each tensor by a number or nested lists, also inside nested lists, and return the values."""
    if isinstance(values, Tensor):
        if values.dim() == 0:
            return values.item()
        return values.tolist()
    if isinstance(values, list | tuple):
        return [_plain(value) for value in values]
    return values


def fake_tensors() -> FakeTensorMode:
    """Return the mode in which tensors have shapes but no values. Operations may also use real CPU tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)
