"""The loss over a cut vocabulary, with or without cut tokens, compared with the op over all of them."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hybridtron.config.schema import ParallelConfig
from hybridtron.ops import loss as ops
from hybridtron.ops.dispatch import force
from hybridtron.parallel.pool import Seat
from hybridtron.parallel.vocabulary import linear_cross_entropy
from hybridtron.planning import count
from tests.distributed import run_distributed

VOCABULARY = 24
WIDTH = 6
ROWS = 3
LENGTH = 8


def inputs(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the stream, the weight, labels and a mask. One row is fully masked, and masked labels are not tokens."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (
        scale * torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((LENGTH, ROWS, WIDTH), (VOCABULARY, WIDTH))
    )
    labels = torch.randint(VOCABULARY, (LENGTH, ROWS), generator=generator)
    mask = torch.rand(LENGTH, ROWS, generator=generator) < 0.7
    mask[:, 1] = False
    labels[:, 1] = -100
    return x, weight, labels, mask


def loss_on_ranks(
    seat: Seat, dtype: torch.dtype, scale: float, z_loss: float, sequence: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the loss and this rank's gradients of stream and weight, with 7 tokens' logits at a time."""
    with seat.groups(ParallelConfig(tensor=seat.world_size, sequence=sequence)) as groups:
        x, weight, labels, mask = inputs(dtype, scale)
        stream = x.clone()
        if sequence:
            stream = x.chunk(seat.world_size)[seat.rank].clone()
        stream.requires_grad_()
        share = weight.chunk(seat.world_size)[seat.rank].clone().requires_grad_()
        with patch.object(count, "LOGITS_BYTES", 7 * len(share) * dtype.itemsize):
            loss = linear_cross_entropy(stream, share, labels, mask, z_loss, groups.tensor)
        return [value.detach() for value in loss], *torch.autograd.grad(3.0 * loss.total, (stream, share))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("dtype", "scale", "z_loss", "tolerance"),
    [
        (torch.float64, 1.0, 0.0, 1e-12),
        (torch.float64, 20.0, 1e-3, 1e-12),
        (torch.float32, 2.0, 1e-3, 1e-5),
        (torch.bfloat16, 2.0, 1e-3, 2e-2),
    ],
)
@pytest.mark.parametrize(("ranks", "sequence"), [(2, False), (2, True), (4, False), (4, True)])
def test_loss_over_tensor_parallel_ranks_equals_the_op(
    ranks: int, sequence: bool, dtype: torch.dtype, scale: float, z_loss: float, tolerance: float
) -> None:
    x, weight, labels, mask = inputs(dtype, scale)
    exact_x, exact_weight = (t.double().requires_grad_() for t in (x, weight))
    with force("reference"):
        expected = ops.linear_cross_entropy(ops.LinearCrossEntropyInputs(exact_x, exact_weight, labels, mask, z_loss))
    of_x, of_weight = torch.autograd.grad(3.0 * expected.total, (exact_x, exact_weight))
    results = run_distributed(loss_on_ranks, ranks, dtype, scale, z_loss, sequence)
    for loss, share_of_x, _ in results:
        for ours, theirs in zip(loss, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs.detach().double(), rtol=tolerance, atol=tolerance)
        if not sequence:
            assert_near(share_of_x, of_x, tolerance)
    if sequence:
        assert_near(torch.cat([share for _, share, _ in results]), of_x, tolerance)
    assert_near(torch.cat([share for _, _, share in results]), of_weight, tolerance)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare tensors with a tolerance relative to the largest entry."""
    size = expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance * size)
