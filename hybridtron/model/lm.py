"""The language model: embedding, stack, norm, head. Tokens in, logits out, states beside them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridtron.config.architecture import architecture, parameter_table
from hybridtron.config.schema import ModelConfig
from hybridtron.data.batch import SeqInfo
from hybridtron.model.layer import RMSNorm
from hybridtron.model.stack import Stack, States
from hybridtron.parallel.linear import Embedding, column_parallel


class ModelOut(NamedTuple):
    """logits_LBV of every position, the states after the last one, and the mixers' auxiliary losses by name."""

    logits_LBV: Tensor
    states: States
    aux: dict[str, Tensor]


class LanguageModel(nn.Module):
    """The whole model on one process. Weights are uninitialised until `model/init.py` or a checkpoint fills them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = parameter_table(config)
        self.embedding = Embedding(config.vocab_size, config.width)
        self.layers = Stack(architecture(config), config.norm_eps)
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tie_embeddings else column_parallel(config.width, config.vocab_size)

    def forward(self, tokens_BL: Tensor, states: States | None, seq: SeqInfo) -> ModelOut:
        x_LBD = self.embedding(tokens_BL.T)
        x_LBD, new_states, aux = self.layers(x_LBD, states, seq)
        x_LBD = self.norm(x_LBD)
        logits_LBV = functional.linear(x_LBD, self.embedding.weight) if self.head is None else self.head(x_LBD)
        return ModelOut(logits_LBV, new_states, aux)

    def cast(self, dtype: torch.dtype) -> LanguageModel:
        """Compute in `dtype`; what the table marks fp32 (A_log, D, dt bias) stays in fp32."""
        for name, weight in self.named_parameters():
            if not self.table[name].fp32:
                weight.data = weight.data.to(dtype)
        return self
