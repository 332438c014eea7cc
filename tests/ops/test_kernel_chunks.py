"""What the planner takes for the tokens of the kernels' chunks is what the kernels have."""

from __future__ import annotations

import pytest
import torch

from hybridtron.architecture.linear_attention import KERNEL_CHUNK
from hybridtron.architecture.mamba2 import kernel_chunk

pytest.importorskip("triton")


def test_of_linear_attention() -> None:
    from hybridtron.ops.delta import kernels_tiles
    from hybridtron.ops.gla import kernels

    assert kernels.tiles(torch.bfloat16).chunk == kernels_tiles.tiles(torch.bfloat16).chunk == KERNEL_CHUNK


@pytest.mark.parametrize(("head", "state"), [(64, 128), (32, 16), (64, 256), (128, 64)])
def test_of_ssd(head: int, state: int) -> None:
    from hybridtron.ops.ssd import kernels_row

    assert kernels_row.tiles(torch.bfloat16, head, state).chunk == kernel_chunk(head, state)
