"""What `bench_kernels` holds the forms of an op against: other packages' kernels, and several calls in place of one."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional

from hybridtron.ops.dispatch import Op
from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm
from hybridtron.ops.scan.reference import step_sizes
from hybridtron.ops.ssd import SSDInputs, ssd_scan


def others(op: Op[Any, Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """By name, those that this machine can run."""
    if op is rms_norm:
        yield "torch", torch_norm
    if op is add_rms_norm:
        yield "one by one", add_rms_norm.reference.function
        yield "torch", torch_add_norm
    if op is ssd_scan and importlib.util.find_spec("fla") is not None:
        yield "fla", fla_ssd


def torch_norm(inputs: RMSNormInputs) -> Tensor:
    x, weight, eps = inputs
    return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def torch_add_norm(inputs: AddRMSNormInputs) -> tuple[Tensor, Tensor]:
    summed = inputs.x + inputs.added
    return summed, torch_norm(RMSNormInputs(summed, inputs.weight, inputs.eps))


def fla_ssd(inputs: SSDInputs) -> Tensor:
    """The same recurrence as fla's gated linear attention with one decay a head; its heads do not share B and C."""
    chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    x, dt, A, B, C, D, bias, _, _ = inputs
    delta = step_sizes(dt, bias)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (B, C))
    v = (x * delta.unsqueeze(3)).to(x.dtype)
    return chunk_simple_gla(C, B, v, delta * A, scale=1.0)[0] + D.to(x.dtype)[:, None] * x
