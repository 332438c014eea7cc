"""Cross entropy over a vocabulary that is cut, against the op that sees it whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.config.schema import ParallelConfig
from hybridtron.ops import loss as ops
from hybridtron.ops.dispatch import force
from hybridtron.parallel.loss import cross_entropy
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed

VOCABULARY, ROWS, LENGTH = 24, 3, 5


def inputs(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and a mask; a row is all masked, and what is masked is no number and no token."""
    generator = torch.Generator().manual_seed(1)
    logits = scale * torch.randn(LENGTH, ROWS, VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(VOCABULARY, (LENGTH, ROWS), generator=generator)
    mask = torch.rand(LENGTH, ROWS, generator=generator) < 0.7
    mask[:, 1] = False
    logits[:, 1, 3] = torch.nan
    labels[:, 1] = -100
    return logits, labels, mask


def loss_on_ranks(seat: Seat, dtype: torch.dtype, scale: float, z_loss: float) -> tuple[Tensor, ...]:
    """The loss of this rank's share of the logits, and its gradient."""
    with seat.groups(ParallelConfig(tensor=seat.world_size)) as groups:
        logits, labels, mask = inputs(dtype, scale)
        share = logits.chunk(seat.world_size, dim=-1)[seat.rank].contiguous().requires_grad_()
        loss = cross_entropy(share, labels, mask, z_loss, groups.tensor)
        (gradient,) = torch.autograd.grad(3.0 * loss.total, share)
        return loss.total.detach(), loss.cross_entropy, loss.tokens, loss.per_token, gradient


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("dtype", "scale", "z_loss", "tolerance"),
    [
        (torch.float64, 1.0, 0.0, 1e-12),
        (torch.float64, 500.0, 1e-3, 1e-12),
        (torch.float32, 3.0, 1e-3, 1e-5),
        (torch.bfloat16, 3.0, 1e-3, 1e-2),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_the_op(ranks: int, dtype: torch.dtype, scale: float, z_loss: float, tolerance: float) -> None:
    logits, labels, mask = inputs(dtype, scale)
    logits.requires_grad_()
    with force("reference"):
        expected = ops.cross_entropy(logits, labels, mask, z_loss)
    (gradient,) = torch.autograd.grad(3.0 * expected.total, logits)
    found = run_distributed(loss_on_ranks, ranks, dtype, scale, z_loss)
    for *loss, _ in found:
        for ours, theirs in zip(loss, expected, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=tolerance, atol=tolerance)
    joined = torch.cat([share for *_, share in found], dim=-1)
    torch.testing.assert_close(joined, gradient, rtol=tolerance, atol=tolerance)
    assert not joined[~mask].any()
