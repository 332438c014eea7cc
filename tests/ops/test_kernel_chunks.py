"""The planner's chunk sizes are the kernels' own."""

from __future__ import annotations

import pytest
import torch

from hybridtron.architecture import linear_attention, mamba2
from hybridtron.architecture.base import ModelSizes

pytest.importorskip("triton")
TYPES = pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, 2), (torch.float32, 1)], ids=str)


@TYPES
def test_of_linear_attention(dtype: torch.dtype, wide: int) -> None:
    from hybridtron.ops.delta import kernels_tiles
    from hybridtron.ops.gla import kernels

    planned = linear_attention.kernel_chunk(ModelSizes(64, 2, wide=wide))
    assert kernels.tiles(dtype).chunk == kernels_tiles.tiles(dtype).chunk == planned


@TYPES
@pytest.mark.parametrize(("head", "state"), [(64, 128), (32, 16), (64, 256), (128, 64)])
def test_of_ssd(head: int, state: int, dtype: torch.dtype, wide: int) -> None:
    from hybridtron.ops.ssd import kernels_row

    planned = mamba2.kernel_chunk(head, state, ModelSizes(64, 2, wide=wide))
    assert kernels_row.tiles(dtype, head, state).chunk == planned
