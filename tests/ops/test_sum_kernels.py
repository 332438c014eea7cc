"""The kernel that adds up partial sums, against torch's sums in float64."""

from __future__ import annotations

import pytest
import torch

from hybridtron.device import compute_device
from tests.ops.compiling import compile_calls

pytestmark = pytest.mark.usefixtures("interpreter")
CASES = [
    (torch.float32, False, 1e-6),
    (torch.float64, False, 1e-6),
    (torch.bfloat16, False, 2**-7),  # the interpreter truncates
    (torch.float32, True, 2**-23),
    (torch.float64, True, 1e-14),
]


@pytest.mark.parametrize("parts", [0, 1, 65, 130])
@pytest.mark.parametrize("size", [1, 33])
@pytest.mark.parametrize(("dtype", "precise", "tolerance"), CASES, ids=str)
def test_sums_equal_those_of_torch(
    parts: int, size: int, dtype: torch.dtype, *, precise: bool, tolerance: float
) -> None:
    """A program loads 64 parts at a time, so 65 and 130 parts take two and three turns."""
    from hybridtron.ops.sum_kernels import sum_of_parts  # not above: imported again for the interpreter

    parts_KSN = torch.rand(2, parts, size, device=compute_device())
    sums_KN = sum_of_parts(parts_KSN, dtype, precise)
    assert sums_KN.dtype == dtype
    exact_KN = parts_KSN.double().sum(1)
    torch.testing.assert_close(sums_KN.double(), exact_KN, rtol=tolerance, atol=0)


@pytest.mark.parametrize("precise", [False, True])
def test_precise_sums_keep_what_fp32_rounds_away(precise: bool) -> None:
    from hybridtron.ops.sum_kernels import PARTS, sum_of_parts

    parts_KSN = torch.zeros(1, 2 * PARTS + 1, 1, device=compute_device())
    parts_KSN[0, 0] = 2.0**30
    parts_KSN[0, PARTS] = 1.0  # added to the first part in the second turn
    parts_KSN[0, 2 * PARTS] = -(2.0**30)
    assert sum_of_parts(parts_KSN, torch.float32, precise).item() == (1.0 if precise else 0.0)


def test_sums_of_float64_are_precise() -> None:
    from hybridtron.ops.sum_kernels import sum_of_parts

    parts_KSN = torch.randn(2, 130, 33, dtype=torch.float64, device=compute_device())
    torch.testing.assert_close(sum_of_parts(parts_KSN, torch.float64, True), parts_KSN.sum(1))


def shipped() -> None:
    """Launch the kernel for one part and for many, with every kind of accumulation."""
    from hybridtron.ops.sum_kernels import sum_of_parts

    with torch.device("meta"):
        for parts in (1, 1056):
            parts_KSN = torch.empty(3, parts, 512)
            sum_of_parts(parts_KSN, torch.bfloat16)
            sum_of_parts(parts_KSN, torch.float32, precise=True)
            sum_of_parts(parts_KSN.double(), torch.float64, precise=True)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    launches, _ = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {"_sum_of_parts"}
    assert [fault for launch in launches for fault in launch.faults()] == []
