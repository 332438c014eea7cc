"""Token embedding, replicated on one rank or sharded over the vocabulary by megatron-core."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor, nn
from torch.nn import functional

from hybridtron.parallel.linear import TensorGroup, leave_unfilled
from hybridtron.parallel.mcore import layer_config


class Embedding(nn.Module):
    """Token embedding for one rank; the output head may share its weight."""

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
            init_method=leave_unfilled,
            reduce_scatter_embeddings=tensor.sequence,
            config=layer_config(tensor.size, sequence=tensor.sequence),
            tp_group=tensor.group,
        )

    def forward(self, tokens_BL: Tensor) -> Tensor:
        # Megatron returns (L, B, D) only when it scatters the sequence; otherwise it keeps the order of the tokens.
        return super().forward(tokens_BL if self.reduce_scatter_embeddings else tokens_BL.T)


def embedding(vocab_size: int, width: int, tensor: TensorGroup) -> nn.Module:
    """Build the module that maps tokens (B, L) to the start of the residual stream (L, B, D)."""
    if tensor.size == 1:
        return Embedding(vocab_size, width)
    return VocabularyParallel(vocab_size, width, tensor)
