"""Cross-entropy and z-loss against torch's own loss, and deaf to whatever is masked."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from hybridtron.ops.loss import CrossEntropyInputs, Loss, cross_entropy


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (2, 5, 11), labels and mask, the same at every call; the last rows are masked."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 5, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(11, (2, 5), generator=generator)
    mask = torch.rand(2, 5, generator=generator) < 0.7
    mask[:, -1] = False
    return logits.to(dtype).requires_grad_(), labels, mask


def run(logits: Tensor, labels: Tensor, mask: Tensor, z_loss: float) -> tuple[Loss, Tensor]:
    """The loss and the gradient of its total at the logits."""
    loss = cross_entropy(CrossEntropyInputs(logits, labels, mask, z_loss))
    return loss, torch.autograd.grad(loss.total, logits)[0]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_loss_equals_torch_cross_entropy_plus_z_loss(z_loss: float) -> None:
    logits, labels, mask = case()
    loss, grad = run(logits, labels, mask, z_loss)
    expected = F.cross_entropy(logits.transpose(1, 2), labels.masked_fill(~mask, -100), reduction="none")
    total = expected.sum() + z_loss * logits.logsumexp(-1)[mask].square().sum()
    torch.testing.assert_close(loss.per_token, expected.detach())
    torch.testing.assert_close(loss.cross_entropy, expected.detach().sum())
    torch.testing.assert_close(loss.total, total)
    torch.testing.assert_close(grad, torch.autograd.grad(total, logits)[0])
    assert loss.tokens.dtype == torch.float32
    assert loss.tokens == mask.sum()
    assert loss.total.requires_grad
    assert not loss.cross_entropy.requires_grad
    assert not loss.per_token.requires_grad


def test_gradients_are_the_slopes() -> None:
    logits, labels, mask = case()
    assert gradcheck(lambda x: 0.5 * cross_entropy(CrossEntropyInputs(x, labels, mask, 0.1)).total, (logits,))


@pytest.mark.parametrize("label", [-100, -1, 11, 10**12])
@pytest.mark.parametrize("logit", [torch.inf, -torch.inf, torch.nan, 1e30])
def test_masked_tokens_change_no_bit(label: int, logit: float) -> None:
    logits, labels, mask = case(torch.float32)
    loss, grad = run(logits, labels, mask, 0.1)
    wild = logits.detach().masked_fill(~mask[..., None], logit).requires_grad_()
    wild_loss, wild_grad = run(wild, labels.masked_fill(~mask, label), mask, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(loss, wild_loss, strict=True))
    assert torch.equal(grad, wild_grad)
    assert not grad[~mask].any()


def test_fully_masked_batch_has_zero_loss_and_gradient() -> None:
    logits, labels, mask = case()
    loss, grad = run(logits, labels, torch.zeros_like(mask), 0.1)
    assert loss.total == loss.tokens == 0
    assert not grad.any()


def test_bf16_logits_are_widened() -> None:
    logits, labels, mask = case(torch.bfloat16)
    loss, grad = run(logits, labels, mask, 0.1)
    exact, exact_grad = run(logits.detach().double().requires_grad_(), labels, mask, 0.1)
    assert loss.total.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.total.double(), exact.total, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=2**-8, atol=1e-6)
