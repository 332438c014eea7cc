"""The Triton kernel of rotary positions against the reference in float64, and as compiled for a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.rope import RopeOptions
from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.rope import RopeInputs, apply_rope, rope_table
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")


def results(implementation: str, x: Tensor, table: tuple[Tensor, Tensor], dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with force(apply_rope=implementation):
        y = apply_rope(RopeInputs(x, *table))
    return [y.detach(), *torch.autograd.grad(y, x, dy)]


def assert_right(x: Tensor, rotary: int, dtype: torch.dtype, tolerance: float) -> None:
    device = compute_device()
    table = rope_table(torch.randint(10_000, x.shape[:2]), rotary, RopeOptions())
    x = x.to(dtype)
    dy = torch.randn(x.shape).to(dtype)
    expected = results("reference", x.double(), (table[0].double(), table[1].double()), dy.double())
    actual = results("triton", x.to(device), (table[0].to(device), table[1].to(device)), dy.to(device))
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, dtype)
        assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize(("size", "rotary"), [(8, 8), (6, 6), (12, 4), (7, 4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-7), (torch.bfloat16, 2**-7)], ids=str)
def test_triton_rope_equals_the_reference_at_any_size(
    heads: int, size: int, rotary: int, dtype: torch.dtype, tolerance: float
) -> None:
    assert_right(torch.randn(2, 5, heads, size), rotary, dtype, tolerance)


def test_triton_rope_accepts_tokens_first_in_memory() -> None:
    """Tokens first, and keys beside values, as the mixer hands them over."""
    key_values = torch.randn(5, 2, 2 * 3 * 8)
    keys = key_values.transpose(0, 1).chunk(2, dim=-1)[0].unflatten(-1, (3, 8))
    assert_right(keys, 8, torch.float32, 3e-7)
    queries = torch.randn(5, 2, 3 * 8).transpose(0, 1).unflatten(-1, (3, 8))
    assert_right(queries, 8, torch.float32, 3e-7)


def test_triton_rope_keeps_channels_that_are_not_rotated() -> None:
    x = torch.randn(2, 5, 3, 12)
    table = rope_table(torch.arange(5).expand(2, 5), 4, RopeOptions())
    assert torch.equal(results("triton", x, table, x)[0][..., 4:], x[..., 4:])


def shipped() -> None:
    """Launch the kernels at the sizes of recipes."""
    with torch.device("meta"):
        cos, sin = (torch.empty(8, 4096, 64) for _ in range(2))
        for dtype in (torch.bfloat16, torch.float32):
            key_values = torch.empty(4096, 8, 2 * 18 * 128, dtype=dtype).transpose(0, 1)
            x = key_values.chunk(2, dim=-1)[0].unflatten(-1, (18, 128)).requires_grad_()
            y = apply_rope.named("triton").function(RopeInputs(x, cos, sin))
            y.backward(torch.empty_like(y))


@pytest.mark.slow
def test_triton_rope_compiles_for_a_hopper_gpu_without_spills() -> None:
    launches, buffers = compile_calls("tests.ops.rope.test_kernels", "shipped")
    assert {launch.kernel for launch in launches} == {"_rotate"}
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert max(buffers) == 4096 * 8 * 2 * 18 * 128
