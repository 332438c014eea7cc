"""Language model, or one pipeline stage of it: embedding, sub-layers, norm, head.

States are passed in and returned together with the tokens' outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture, parameter_table
from hybridtron.config.schema import Recompute
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.norm import RMSNorm
from hybridtron.model.shared import share_weights
from hybridtron.model.stack import Stack, States
from hybridtron.ops.multiplied import multiplied
from hybridtron.parallel.adapters import attach_adapters
from hybridtron.parallel.embedding import embedding
from hybridtron.parallel.linear import SINGLE_RANK, TensorGroup, enter
from hybridtron.parallel.loss import Head, whole_vocabulary
from hybridtron.parallel.mesh import Mesh, single_rank


@dataclass(frozen=True)
class ModelSlice:
    """The part of the model to build: its sub-layers (None: all), its ends, and its tensor-parallel shard.

    `meshes` has the ranks that cut the weights of each family.
    """

    layers: range | None = None
    first: bool = True
    last: bool = True
    tensor: TensorGroup = SINGLE_RANK
    meshes: Mapping[str, Mesh] = field(default_factory=single_rank)


FULL_MODEL = ModelSlice()


def stream_dtype(computed: torch.dtype, residual_fp32: bool) -> torch.dtype:
    """Return the dtype of the residual stream between sub-layers and between pipeline stages."""
    if residual_fp32:
        return torch.promote_types(computed, torch.float32)
    return computed


class ModelOut(NamedTuple):
    """Output of a stage, the states after the last token, and the mixers' auxiliary losses by name.

    The last stage outputs logits (L, B, V) for this rank's share of the vocabulary; without logits, it outputs the
    normed and scaled stream, which `output_weight` would be multiplied with. Other stages output the stream (L, B, D).
    """

    output: Tensor
    states: States
    aux: dict[str, Tensor]


class LanguageModel(nn.Module):
    """Language model with uninitialised weights, which `model/init.py` or a checkpoint fills."""

    def __init__(
        self,
        config: ModelConfig,
        model_slice: ModelSlice = FULL_MODEL,
        recompute: Recompute = Recompute.none,
        offload: int = 0,
    ) -> None:
        super().__init__()
        arch = architecture(config)
        tensor = model_slice.tensor
        self.slice = model_slice
        self.recompute = recompute
        self.tied = config.tie_embeddings
        self.residual_fp32 = config.residual_fp32
        self.embedding_multiplier = config.embedding_multiplier
        self.logits_scaling = config.logits_scaling
        if model_slice.first:
            self.embedding = embedding(config.vocab_size, config.width, tensor)
        elif model_slice.last and self.tied:
            self.embedding = Head(config.width, config.vocab_size, tensor)
        if model_slice.layers is None:
            layers = range(len(arch.specs))
        else:
            layers = model_slice.layers
        stack = Stack(arch, layers, config.norm_eps, tensor, recompute, offload, config.residual_multiplier)
        # this order gives shared weights their names
        self.shared = share_weights(stack, arch)
        self.layers = stack
        self.carries_embedding = arch.carries_embedding
        if model_slice.last:
            self.norm = RMSNorm(config.width, config.norm_eps)
            if not self.tied:
                self.head = Head(config.width, config.vocab_size, tensor)
        whole_table = parameter_table(config)
        attach_adapters(self, whole_table, config.adapters, tensor)
        self.table = {name: whole_table[name] for name, _ in self.named_parameters()}

    def forward(
        self,
        tokens_BL: Tensor,
        states: States | None,
        seq: SeqInfo,
        x_LBD: Tensor | None = None,
        logits: bool = True,
    ) -> ModelOut:
        """Run this stage. `x_LBD` is the stream from the previous stage, if there is one.

        Training losses need no `logits`. If a sub-layer reads the embedding, stages pass it on, concatenated along the
        tokens behind the stream.
        """
        embedded_LBD = None
        if x_LBD is None:
            x_LBD = self.embedding(tokens_BL)
            x_LBD = x_LBD.to(stream_dtype(x_LBD.dtype, self.residual_fp32))
            x_LBD = multiplied(x_LBD, self.embedding_multiplier)
            if not self.slice.last and torch.is_grad_enabled():
                # the next stage sends gradients back, even if all weights of this stage are frozen
                x_LBD.requires_grad_()
            embedded_LBD = x_LBD if self.carries_embedding else None
        elif self.carries_embedding:
            x_LBD, embedded_LBD = x_LBD.chunk(2)
        x_LBD, new_states, aux = self.layers(x_LBD, states, seq, embedded_LBD)
        if not self.slice.last:
            if embedded_LBD is None:
                sent_LBD = x_LBD
            else:
                sent_LBD = torch.cat((x_LBD, embedded_LBD))
            return ModelOut(sent_LBD, new_states, aux)
        x_LBD = multiplied(self.norm(x_LBD), 1 / self.logits_scaling)
        if logits:
            x_LBD = functional.linear(enter(x_LBD, self.slice.tensor), self.output_weight())
        return ModelOut(x_LBD, new_states, aux)

    def next_logits(self, x_LBD: Tensor) -> Tensor:
        """Return the next token's logits (B, V) over the full vocabulary; `x_LBD` is the last stage's output."""
        x_BD = enter(x_LBD, self.slice.tensor)[-1]
        return whole_vocabulary(functional.linear(x_BD, self.output_weight()), self.slice.tensor)

    def output_weight(self) -> Tensor:
        """Return the head's weight, or the embedding's if both are tied."""
        if self.tied and self.slice.first:
            return self.get_parameter("embedding.weight")
        if self.tied:
            return self.embedding()
        return self.head()

    def cast(self, dtype: torch.dtype) -> LanguageModel:
        """Convert the weights to `dtype`; those marked fp32 in the table (A_log, D, dt bias) stay in at least fp32."""
        for name, weight in self.named_parameters():
            wide = torch.promote_types(dtype, torch.float32)
            weight.data = weight.data.to(wide if self.table[name].fp32 else dtype)
        return self
