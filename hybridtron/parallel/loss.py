"""Output head and cross entropy over a sharded vocabulary, without materializing the logits.

    loss = sum over unmasked tokens of  lse - logits[label] + z_loss * lse^2,   lse = log sum_v exp(logits[v])

Each rank multiplies with its own shard of the vocabulary; then the ranks exchange one maximum, one sum and one label
logit per token, but no other logits. The gradient of the head's input is summed over ranks where the input entered, as
for any column-parallel layer.

Legend: L tokens, B rows, D width, C tokens whose logits are computed together, V this rank's vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hybridtron.ops import loss as ops
from hybridtron.ops.loss import LinearCrossEntropyInputs, Loss, VocabularyShare
from hybridtron.ops.softmax import SoftmaxSums
from hybridtron.parallel.linear import TensorGroup, enter


class Head(nn.Module):
    """Weight of the output head. A call returns it, because only the call makes Megatron wait for the weight's
    all-gather.
    """

    def __init__(self, width: int, vocab_size: int, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tensor.share(vocab_size), width))

    def forward(self) -> Tensor:
        return self.weight


def linear_cross_entropy(
    x_LBD: Tensor, weight_VD: Tensor, labels_LB: Tensor, mask_LB: Tensor, z_loss: float, tensor: TensorGroup
) -> Loss:
    """Return the loss of a head over this rank's vocabulary shard; the same numbers on every rank.

    `x_LBD` is the residual stream, which under sequence parallelism holds this rank's tokens only. Labels and mask are
    those of all tokens.
    """
    x_LBD = enter(x_LBD, tensor)
    share = None
    if tensor.size > 1:
        share = VocabularyShare(tensor.rank * len(weight_VD), partial(_joined, group=tensor.group))
    return ops.linear_cross_entropy(LinearCrossEntropyInputs(x_LBD, weight_VD, labels_LB, mask_LB, z_loss, share))


def whole_vocabulary(logits_BV: Tensor, tensor: TensorGroup) -> Tensor:
    """All-gather the logits of the full vocabulary, without gradients."""
    if tensor.size == 1:
        return logits_BV
    shares = [torch.empty_like(logits_BV) for _ in range(tensor.size)]
    dist.all_gather(shares, logits_BV.contiguous(), group=tensor.group)
    return torch.cat(shares, dim=-1)


def likeliest(x_LBD: Tensor, weight_VD: Tensor, tensor: TensorGroup) -> Tensor:
    """Return the token with the largest logit at each position, (L, B), without gradients."""
    greatest_LB, token_LB = functional.linear(enter(x_LBD, tensor), weight_VD).max(-1)
    if tensor.size == 1:
        return token_LB
    own_2LB = torch.stack([greatest_LB.double(), (token_LB + tensor.rank * len(weight_VD)).double()])
    shares = [torch.empty_like(own_2LB) for _ in range(tensor.size)]
    dist.all_gather(shares, own_2LB, group=tensor.group)
    greatest_RLB, token_RLB = torch.stack(shares, dim=1)
    return token_RLB.gather(0, greatest_RLB.argmax(0, keepdim=True))[0].long()


def _joined(own: SoftmaxSums, group: dist.ProcessGroup | None) -> SoftmaxSums:
    """Combine the softmax sums of all vocabulary shards."""
    greatest_C = own.greatest_C.clone()
    dist.all_reduce(greatest_C, op=dist.ReduceOp.MAX, group=group)
    exchanged_2C = torch.stack([own.sum_C * (own.greatest_C - greatest_C).exp(), own.picked_C])
    dist.all_reduce(exchanged_2C, group=group)
    return SoftmaxSums(greatest_C, *exchanged_2C)
