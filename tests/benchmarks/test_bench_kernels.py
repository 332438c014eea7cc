"""The kernels' table without a GPU. Everything that it would measure on one can be called."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import HEADER, KERNELS, QUICK, Kernel, Sizes, passes, seconds
from hybridtron.cli import bench


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_page_without_a_gpu_holds_a_rehearsal(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine measures")
    page = tmp_path / "kernels.md"
    assert bench.main(["kernels", "--quick", "--output", str(page)]) == 0
    cells = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    assert cells[0] == list(HEADER)
    numbers = {tuple(line[:4]): [float(number) for number in line[4:]] for line in cells[2:]}
    assert {kernel for kernel, *_ in numbers} == {make(QUICK, 48).name for make in KERNELS}
    for kernel, length, form, name in numbers:
        if name == "backward":
            whole, forward, backward = (numbers[kernel, length, form, part] for part in ("both", "forward", "backward"))
            assert whole[0] == forward[0] + backward[0]
            assert whole[1] == pytest.approx(forward[1] + backward[1], rel=0.01)


@pytest.mark.parametrize("make", KERNELS)
def test_every_kernel_can_be_called(make: Callable[[Sizes, int], Kernel]) -> None:
    kernel = make(QUICK, QUICK.lengths[0])
    forms = dict(kernel.implementations("cpu"))
    assert forms
    for run in forms.values():
        for one_pass in passes(kernel, run).values():
            for _ in range(3):  # as a timer does
                one_pass()


def test_kernel_calls_are_timed() -> None:
    assert 0.002 < seconds(lambda: time.sleep(0.002)) < 2  # on a busy machine a sleeper wakes late
