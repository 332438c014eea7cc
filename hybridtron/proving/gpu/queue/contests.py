"""Compares our kernels for an op with another package's kernels: times and outputs, on the same tensors.

Times are measured for the forward pass alone, and for the forward and backward pass together. The other package's
kernels are autotuned over only two configurations, because trying all configurations takes minutes. With more
configurations, the other package might be faster.

Letters for sizes:

    B   sequences
    L   tokens
    H   heads
    N   key channels per head, or state size
    P   value channels per head
    E   channels in the selective scan
    C   channels in the convolution
    D   channels in the norm
    G   groups; for the delta rule, decays per head

In names of sizes such as `32x512 H4 K128 V256`, for linear attention, the letters K and V stand for N and P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._pytree import tree_leaves

from hybridtron.device import compute_device
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.dispatch import Op, force
from hybridtron.ops.gated_norm import NormBeforeGateInputs, norm_before_gate
from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.kernel_launch import TRITON, tuned_over
from hybridtron.ops.scan import ScanInputs, selective_scan
from hybridtron.ops.ssd import SSDInputs, ssd_scan
from hybridtron.proving.gpu.queue import fla
from hybridtron.proving.gpu.queue.machine import fastest
from hybridtron.proving.gpu.queue.rows import Recorder

CONFIGURATIONS = 2
EPS = 1e-5


@dataclass(frozen=True)
class Contest:
    """A comparison between our kernels for one op and another package's kernels.

    sizes    a size's name -> arguments of the function `inputs`
    tiny     arguments of the function `inputs` for a run on a CPU
    inputs   function that returns random inputs for the op
    ours     function that calls our op with the inputs
    theirs   function that calls the other package's op with the inputs
    """

    sizes: Mapping[str, tuple[int, ...]]
    tiny: tuple[int, ...]
    inputs: Callable[..., Any]
    ours: Callable[[Any], Any]
    theirs: Callable[[Any], Any]


def contest(record: Recorder, name: str) -> None:
    """Measure our op and the other package's op at each size, and record the relative difference of their outputs.

    Our op is measured first, so that its times are recorded even if the other package's op fails.
    """
    chosen = CONTESTS[name]
    sizes = {"tiny": chosen.tiny} if record.tiny else chosen.sizes
    for size, numbers in sizes.items():
        torch.manual_seed(0)
        inputs = chosen.inputs(*numbers)
        model = record.modelled.get("calls", {}).get(f"{name}, {size}", {})
        ours: Tensor | None = None
        with record.case(f"{size}, ours") as row:
            ours = first(chosen.ours(inputs)).detach().float()
            row |= passes(chosen.ours, inputs) | {"model_ms": model.get("ms")}
        with record.case(f"{size}, theirs") as row, nullcontext() if record.tiny else tuned_over(CONFIGURATIONS):
            theirs = first(chosen.theirs(inputs)).detach().float()
            row |= passes(chosen.theirs, inputs)
            if ours is None:
                row["apart"] = None
            else:
                row["apart"] = ((theirs - ours).norm() / ours.norm()).item()


def passes(call: Callable[[Any], Any], inputs: Any) -> dict[str, float]:
    """Return the milliseconds for the forward pass alone, and for forward and backward together."""
    with torch.no_grad():
        forward = fastest(lambda: call(inputs))
    return {"forward_ms": 1e3 * forward, "both_ms": 1e3 * fastest(lambda: both(call, inputs))}


def both(call: Callable[[Any], Any], inputs: Any) -> object:
    """Run the forward and backward pass, and return the gradients of all inputs."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    y = first(call(inputs))
    return torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a function for each contest and size. The function runs both passes of our op."""
    for name, chosen in CONTESTS.items():
        for size, numbers in chosen.sizes.items():
            yield f"{name}, {size}", partial(both, chosen.ours, chosen.inputs(*numbers))


def first(outputs: Any) -> Tensor:
    """Return the first output. Some ops return a tuple of their output and states."""
    if isinstance(outputs, tuple):
        return outputs[0]
    return outputs


def by(op: Op[Any, Any], name: str) -> Callable[[Any], Any]:
    """Return a function that calls the op's implementation `name`.

    A CPU can't run this implementation. There, the function calls the op, and the op chooses another implementation.
    """
    return lambda inputs: op(inputs) if compute_device().type == "cpu" else op.named(name).function(inputs)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random numbers that require a gradient."""
    return torch.randn(shape, device=compute_device()).to(dtype).requires_grad_()


def decay(*shape: int) -> Tensor:
    """Return random log decays between -1 and 0."""
    return (-torch.rand(shape, device=compute_device())).requires_grad_()


def unit(*shape: int) -> Tensor:
    """Return random vectors with norm 1 along the last axis: queries and keys for the delta rule."""
    return normalize(torch.randn(shape, device=compute_device()), dim=-1).bfloat16().requires_grad_()


def gla_inputs(B: int, L: int, H: int, N: int, P: int) -> GLAInputs:
    return GLAInputs(normal(B, L, H, N), normal(B, L, H, N), normal(B, L, H, P), decay(B, L, H, N))


def rwkv6_inputs(B: int, L: int, H: int, N: int, P: int) -> tuple[GLAInputs, Tensor]:
    return gla_inputs(B, L, H, N, P), normal(H, N, dtype=torch.float32)


def delta_inputs(B: int, L: int, H: int, N: int, P: int, G: int) -> DeltaInputs:
    beta_BLH = torch.rand(B, L, H, device=compute_device()).requires_grad_()
    return DeltaInputs(unit(B, L, H, N), unit(B, L, H, N), normal(B, L, H, P), beta_BLH, decay(B, L, H, G))


def ssd_inputs(B: int, L: int, H: int, P: int, G: int, N: int) -> SSDInputs:
    A_H = (-torch.rand(H, device=compute_device()) - 0.5).requires_grad_()
    D_H = normal(H, dtype=torch.float32)
    dt_bias_H = normal(H, dtype=torch.float32)
    return SSDInputs(normal(B, L, H, P), normal(B, L, H), A_H, normal(B, L, G, N), normal(B, L, G, N), D_H, dt_bias_H)


def scan_inputs(B: int, L: int, E: int, N: int) -> ScanInputs:
    A_EN = (-torch.rand(E, N, device=compute_device()) - 0.5).requires_grad_()
    B_BLN = normal(B, L, N)
    C_BLN = normal(B, L, N)
    D_E = normal(E, dtype=torch.float32)
    dt_bias_E = normal(E, dtype=torch.float32)
    return ScanInputs(normal(B, L, E), normal(B, L, E), A_EN, B_BLN, C_BLN, D_E, dt_bias_E, normal(B, L, E))


def conv_inputs(B: int, L: int, C: int) -> ConvInputs:
    return ConvInputs(normal(B, L, C), normal(C, 4), normal(C), activation=True)


def norm_inputs(rows: int, channels: int) -> NormBeforeGateInputs:
    """Return inputs with four heads of `channels` channels, at a fourth as many tokens as `rows`."""
    weight_P = torch.ones(channels, device=compute_device()).requires_grad_()
    y_BLHP, z_BLHP = (normal(1, rows // 4, 4, channels) for _ in range(2))
    return NormBeforeGateInputs(y_BLHP, z_BLHP, weight_P, EPS)


def our_rwkv6(inputs: tuple[GLAInputs, Tensor]) -> Tensor:
    from hybridtron.mixers.rwkv6 import read_before_step  # imports megatron-core, which takes seconds

    with force(**({} if compute_device().type == "cpu" else {"gla_scan": TRITON})):
        return read_before_step(*inputs)[0]


SSD_SIZES = {
    "4x2048 H64 P64 G1 N128": (4, 2048, 64, 64, 1, 128),
    "8x4096 H64 P64 G1 N128": (8, 4096, 64, 64, 1, 128),
    "2x4096 H128 P64 G8 N128": (2, 4096, 128, 64, 8, 128),
}
SSD_TINY = (1, 32, 2, 8, 1, 16)
CONV_SIZES = {"8x4096x3072": (8, 4096, 3072), "4x2048x4352": (4, 2048, 4352)}
GLA_SIZES = {"32x512 H4 K128 V256": (32, 512, 4, 128, 256), "8x4096 H4 K128 V256": (8, 4096, 4, 128, 256)}
RWKV6_SIZES = {"256x256 H8 K64 V64": (256, 256, 8, 64, 64), "8x4096 H8 K64 V64": (8, 4096, 8, 64, 64)}
DELTA_SIZES = {
    "8x4096 H8 K96 V192 by head": (8, 4096, 8, 96, 192, 1),
    "8x4096 H16 K128 V128 by head": (8, 4096, 16, 128, 128, 1),
    "8x4096 H8 K128 V128 by channel": (8, 4096, 8, 128, 128, 128),
}
SCAN_SIZES = {"8x4096x3072 N16": (8, 4096, 3072, 16), "4x4096x4608 N16": (4, 4096, 4608, 16)}
NORM_SIZES = {"262144x192": (262144, 192), "65536x256": (65536, 256)}
CONTESTS = {
    "gla, fla-core": Contest(GLA_SIZES, (1, 32, 2, 16, 16), gla_inputs, by(gla_scan, TRITON), fla.gla),
    "rwkv6, fla-core": Contest(RWKV6_SIZES, (1, 32, 2, 16, 16), rwkv6_inputs, our_rwkv6, lambda g: fla.rwkv6(*g)),
    "delta, fla-core": Contest(DELTA_SIZES, (1, 32, 2, 16, 16, 1), delta_inputs, by(delta_scan, TRITON), fla.delta),
    "ssd, fla-core": Contest(SSD_SIZES, SSD_TINY, ssd_inputs, by(ssd_scan, TRITON), fla.ssd),
    "conv, fla-core": Contest(CONV_SIZES, (1, 32, 16), conv_inputs, by(causal_conv, TRITON), fla.conv),
    "gated_rms_norm, fla-core": Contest(
        NORM_SIZES, (64, 32), norm_inputs, by(norm_before_gate, TRITON), fla.gated_rms_norm
    ),
    "ssd, mamba-ssm": Contest(SSD_SIZES, SSD_TINY, ssd_inputs, by(ssd_scan, TRITON), by(ssd_scan, "mamba-ssm")),
    "selective_scan, mamba-ssm": Contest(
        SCAN_SIZES, (1, 32, 16, 4), scan_inputs, by(selective_scan, TRITON), by(selective_scan, "mamba-ssm")
    ),
    "conv, causal-conv1d": Contest(
        CONV_SIZES, (1, 32, 16), conv_inputs, by(causal_conv, TRITON), by(causal_conv, "causal-conv1d")
    ),
}
"""`OP, PACKAGE` -> comparison of our op with the other package's op."""
