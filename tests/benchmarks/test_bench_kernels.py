"""The kernels' table without a GPU, and that what it would measure there can be called."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import FULL, KERNELS, NOT_MEASURED, QUICK, Kernel, Sizes, passes, seconds, window_kernel
from hybridtron.cli import bench
from hybridtron.ops.kernel_cost import Cost, add_rms_norm_cost, rms_norm_cost, ssd_cost


def test_without_a_gpu_the_page_holds_the_paper_counts_alone(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine measures")
    page = tmp_path / "kernels.md"
    assert bench.main(["kernels", "--quick", "--output", str(page)]) == 0
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")][2:]
    assert len(lines) == 8 * 3 * len(QUICK.lengths)
    assert all(line.count(NOT_MEASURED) == 6 for line in lines)
    assert "nothing here was measured on a GPU" in page.read_text()


@pytest.mark.parametrize("make", KERNELS)
def test_every_kernel_can_be_called(make: Callable[[Sizes, int], Kernel]) -> None:
    kernel = make(QUICK, QUICK.lengths[0])
    forms = dict(kernel.implementations("cpu"))
    assert forms
    for run in forms.values():
        for one_pass in passes(run, kernel.inputs, kernel.outputs).values():
            one_pass()


def test_a_call_is_timed() -> None:
    assert 0.002 < seconds(lambda: time.sleep(0.002)) < 0.2


def test_the_counts_of_a_norm_by_hand() -> None:
    """Forward x and y, backward x, dy and dx, of 10 rows of 6 channels in bf16.

    With the sum, forward reads another input and writes the sum, and backward reads the sum's gradient.
    """
    assert rms_norm_cost(10, 6, 2, backward=False).bytes == 2 * 60 * 2
    assert rms_norm_cost(10, 6, 2, backward=True).bytes == 3 * 60 * 2
    assert add_rms_norm_cost(10, 6, 2, backward=False).bytes == 4 * 60 * 2
    assert add_rms_norm_cost(10, 6, 2, backward=True).bytes == 4 * 60 * 2


def test_a_window_costs_its_pairs() -> None:
    """A row of 3 windows: the first sees 1 to w tokens, the others w each; 2 products of 2 operations a channel."""
    heads, head = FULL.attention
    w = FULL.window
    with torch.device("meta"):
        cost = window_kernel(FULL, 3 * w).cost(False)
    assert cost.flops == 4 * heads * head * (w * (w + 1) // 2 + 2 * w * w)


def test_ssd_counts_by_hand() -> None:
    """One chunk of 4 tokens, one head of 2 channels, 3 state entries."""
    cost = ssd_cost(1, 4, 1, 2, 1, 3, 2, 4, backward=False)
    products = 2 * 4 * 4 * 3 + 2 * 4 * 4 * 2 + 2 * (2 * 4 * 2 * 3)  # C B^T, its product with v, states in and out
    read_and_written = 2 * (3 * 8 + 3 * 12 + 4) + 4 * (4 * 6 + 10 * 4)
    assert cost == Cost(read_and_written, products)
