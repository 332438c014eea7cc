"""Token embedding, output head and cross entropy over a sharded vocabulary, without materializing the logits.

    loss = sum over unmasked tokens of  lse - logits[label] + z_loss * lse^2,   lse = log sum_v exp(logits[v])

v runs over the vocabulary, and z_loss is a coefficient from the configuration. Logits are computed for a few tokens at
a time. Each rank computes the logits for its vocabulary shard. Then the ranks all-reduce three numbers per token: the
largest logit, the sum of exponentials, and the label's logit. In backward, `gather_input` sums the input's gradient
over ranks.

Legend: L tokens in a row, B rows (sequences in a micro-batch), D width of the residual stream, C tokens whose logits
are computed together, V entries in this rank's vocabulary shard, R ranks. An axis 2 holds two quantities that are sent
together.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor, nn
from torch.nn import functional

from hybridtron.ops import loss as ops
from hybridtron.ops.loss import LinearCrossEntropyInputs, Loss, VocabularyShare
from hybridtron.ops.softmax import SoftmaxSums
from hybridtron.parallel.linear import TensorGroup, gather_input, no_init
from hybridtron.parallel.mcore import layer_config


class Embedding(nn.Module):
    """Token embedding without tensor parallelism. The output head may share its weight."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return functional.embedding(tokens_BL.T, self.weight)


class VocabularyParallel(VocabParallelEmbedding):
    """Megatron-core's embedding, which shards the weight's rows (the vocabulary) over tensor-parallel ranks."""

    def __init__(self, vocab_size: int, width: int, tensor: TensorGroup) -> None:
        super().__init__(
            vocab_size,
            width,
            init_method=no_init,
            reduce_scatter_embeddings=tensor.sequence,
            config=layer_config(tensor.size, sequence=tensor.sequence),
            tp_group=tensor.group,
        )

    def forward(self, tokens_BL: Tensor) -> Tensor:
        # The result must be (L, B, D). Megatron transposes its result only if it scatters the tokens over ranks.
        # Otherwise the tokens are transposed here, from (B, L) to (L, B).
        return super().forward(tokens_BL if self.reduce_scatter_embeddings else tokens_BL.T)


def embedding(vocab_size: int, width: int, tensor: TensorGroup) -> nn.Module:
    """Build the module that embeds tokens (B, L) as the initial residual stream (L, B, D)."""
    if tensor.size == 1:
        return Embedding(vocab_size, width)
    return VocabularyParallel(vocab_size, width, tensor)


class Head(nn.Module):
    """Output head, which holds this rank's shard of the head's weight; a call returns the shard.

    The call is necessary: a forward pre-hook of Megatron waits until the updated weight has been all-gathered
    (`parallel.overlap_param_gather`).
    """

    def __init__(self, width: int, vocab_size: int, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tensor.share(vocab_size), width))

    def forward(self) -> Tensor:
        return self.weight


def linear_cross_entropy(
    x_LBD: Tensor, weight_VD: Tensor, labels_LB: Tensor, mask_LB: Tensor, z_loss: float, tensor: TensorGroup
) -> Loss:
    """Return the loss over the full vocabulary. The loss is the same on every rank.

    `x_LBD` is the residual stream. Under sequence parallelism it holds only this rank's tokens, but labels and mask
    cover all tokens. `weight_VD` is this rank's shard of the output head.
    """
    x_LBD = gather_input(x_LBD, tensor)
    share = None
    if tensor.size > 1:
        share = VocabularyShare(tensor.rank * len(weight_VD), partial(_joined, group=tensor.group))
    return ops.linear_cross_entropy(LinearCrossEntropyInputs(x_LBD, weight_VD, labels_LB, mask_LB, z_loss, share))


def gather_vocabulary(logits_BV: Tensor, tensor: TensorGroup) -> Tensor:
    """All-gather logits over the full vocabulary, without gradients."""
    if tensor.size == 1:
        return logits_BV
    shards = [torch.empty_like(logits_BV) for _ in range(tensor.size)]
    dist.all_gather(shards, logits_BV.contiguous(), group=tensor.group)
    return torch.cat(shards, dim=-1)


def likeliest(x_LBD: Tensor, weight_VD: Tensor, tensor: TensorGroup) -> Tensor:
    """Return the token with the largest logit at each position, (L, B), without gradients."""
    greatest_LB, token_LB = functional.linear(gather_input(x_LBD, tensor), weight_VD).max(-1)
    if tensor.size == 1:
        return token_LB
    # the largest logit and its token at each position
    own_2LB = torch.stack([greatest_LB.double(), (token_LB + tensor.rank * len(weight_VD)).double()])
    shards = [torch.empty_like(own_2LB) for _ in range(tensor.size)]
    dist.all_gather(shards, own_2LB, group=tensor.group)
    greatest_RLB, token_RLB = torch.stack(shards, dim=1)
    return token_RLB.gather(0, greatest_RLB.argmax(0, keepdim=True))[0].long()


def _joined(own: SoftmaxSums, group: dist.ProcessGroup | None) -> SoftmaxSums:
    """Combine the softmax sums from all vocabulary shards.

    There are three for each token: the largest logit, the sum of exp(logit - largest logit), and the label's logit,
    which is 0 in shards without the label.
    """
    greatest_C = own.greatest_C.clone()
    dist.all_reduce(greatest_C, op=dist.ReduceOp.MAX, group=group)
    exchanged_2C = torch.stack([own.sum_C * (own.greatest_C - greatest_C).exp(), own.picked_C])
    dist.all_reduce(exchanged_2C, group=group)
    return SoftmaxSums(greatest_C, *exchanged_2C)
