"""A Llama in plain PyTorch, as one would write it by hand to be fast on a CPU; our models are measured against it.

Fused projections, torch's own attention and RMSNorm, rotary positions, SwiGLU, tied head. No dropout, no cache.
`tests/benchmarks/test_llama.py` compares its logits with transformers' Llama and its time with torch's own layers.

Legend: B rows, L tokens, D width, H heads, K head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class LlamaSizes:
    """Width, depth, and the hidden size of every MLP."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int

    @staticmethod
    def of(parameters: int, *, width: int, layers: int, heads: int, vocabulary: int) -> LlamaSizes:
        """Choose the hidden size so that the model has about this number of parameters."""
        per_layer = (parameters - vocabulary * width - width) / layers - 4 * width**2 - 2 * width
        return LlamaSizes(width, layers, heads, round(per_layer / (3 * width)), vocabulary)


class LlamaLayer(nn.Module):
    """Attention, then the MLP, each behind a norm and added to the stream."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, width, bias=False)

    def forward(self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x_BLD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (x * cos_LK + rotated_half(x) * sin_LK for x in (q, k))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x_BLD)).chunk(2, dim=-1)
        return x_BLD + self.down(functional.silu(gate) * up)


class PlainLlama(nn.Module):
    """Tokens (B, L) to logits (B, L, V)."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.head_size = sizes.width // sizes.heads
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(LlamaLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.embedding(tokens_BL)
        angles_LK = rotary_angles(tokens_BL.shape[1], self.head_size)
        cos_LK = angles_LK.cos()
        sin_LK = angles_LK.sin()
        for layer in self.layers:
            x_BLD = layer(x_BLD, cos_LK, sin_LK)
        return functional.linear(self.norm(x_BLD), self.embedding.weight)


def rotary_angles(length: int, head_size: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    return torch.outer(torch.arange(length), frequencies).repeat(1, 2)


def rotated_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
