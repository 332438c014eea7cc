"""Token vectors, cut over tensor-parallel ranks by megatron-core."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor, nn
from torch.nn import functional

from hybridtron.parallel.linear import TensorGroup, leave_unfilled
from hybridtron.parallel.mcore import layer_config


class Embedding(nn.Module):
    """Token vectors on one rank; the rows of its weight can serve as the output head too."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return functional.embedding(tokens_BL.T, self.weight)


class VocabularyParallel(VocabParallelEmbedding):
    """Megatron-core's embedding: each rank holds its own tokens' rows."""

    def __init__(self, vocab_size: int, width: int, tensor: TensorGroup) -> None:
        super().__init__(
            vocab_size,
            width,
            init_method=leave_unfilled,
            reduce_scatter_embeddings=tensor.sequence,
            config=layer_config(tensor.size, sequence=tensor.sequence),
            tp_group=tensor.group,
        )

    def forward(self, tokens_BL: Tensor) -> Tensor:
        # when it scatters the sequence Megatron puts it first, otherwise it keeps the order of the tokens
        return super().forward(tokens_BL if self.reduce_scatter_embeddings else tokens_BL.T)


def embedding(vocab_size: int, width: int, tensor: TensorGroup) -> nn.Module:
    """Tokens (B, L) -> the start of the residual stream (L, B, D)."""
    return Embedding(vocab_size, width) if tensor.size == 1 else VocabularyParallel(vocab_size, width, tensor)
