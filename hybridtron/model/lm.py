"""Language model, or one pipeline stage of it: embedding, sub-layers, norm, head.

States of recurrences, convolutions and attention are arguments and results of `forward`, not attributes.

Legend: B rows (sequences), L tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridtron.architecture.table import Architecture
from hybridtron.config.schema import Recompute
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Routed
from hybridtron.mixers.norm import RMSNorm
from hybridtron.model.shared import share_weights
from hybridtron.model.stack import Stack, States
from hybridtron.ops.multiply import multiply
from hybridtron.parallel.adapters import attach_adapters
from hybridtron.parallel.linear import SINGLE_RANK, TensorGroup, gather_input
from hybridtron.parallel.mesh import Mesh, single_rank
from hybridtron.parallel.vocabulary import Head, embedding, gather_vocabulary


@dataclass(frozen=True)
class ModelSlice:
    """The part of the model to build: a range of sub-layers, and one tensor-parallel shard of each.

    layers    the sub-layers' indices; None for all
    first     True if the part has the embedding
    last      True if the part has the final norm and the head
    tensor    the tensor-parallel ranks
    meshes    weight family -> the ranks that shard and replicate its weights
    """

    layers: range | None = None
    first: bool = True
    last: bool = True
    tensor: TensorGroup = SINGLE_RANK
    meshes: Mapping[str, Mesh] = field(default_factory=single_rank)


FULL_MODEL = ModelSlice()


def stream_dtype(computed: torch.dtype, residual_fp32: bool) -> torch.dtype:
    """Return the residual stream's dtype between sub-layers and between pipeline stages."""
    if residual_fp32:
        return torch.promote_types(computed, torch.float32)
    return computed


class ModelOut(NamedTuple):
    """A stage's output, the states after the last token, the mixers' auxiliary losses by name, and routers' choices.

    The last stage outputs logits (L, B, V) for this rank's vocabulary shard. With `logits=False`, it outputs the normed
    and scaled residual stream (L, B, D) instead; `linear(stream, output_weight())` gives the logits. The other stages
    output the residual stream (L, B, D). If a sub-layer reads the embedding, these stages output the stream and the
    embedding, concatenated to (2 * L, B, D). `routed` maps a sub-layer's index to the choices of its router.
    """

    output: Tensor
    states: States
    aux: dict[str, Tensor]
    routed: dict[int, Routed]


class LanguageModel(nn.Module):
    """Language model with uninitialised weights. `model/init.py` or a checkpoint fills the weights.

    `recompute` says which activations are recomputed in the backward pass. Activations from the first `offload`
    sub-layers wait in host memory for the backward pass.
    """

    def __init__(
        self,
        arch: Architecture,
        model_slice: ModelSlice = FULL_MODEL,
        recompute: Recompute = Recompute.none,
        offload: int = 0,
    ) -> None:
        super().__init__()
        config = arch.model
        tensor = model_slice.tensor
        self.arch = arch
        self.slice = model_slice
        self.recompute = recompute
        self.tied = config.tie_embeddings
        self.residual_fp32 = config.residual_fp32
        self.embedding_multiplier = config.embedding_multiplier
        self.logits_scaling = arch.logits_scaling
        if model_slice.first:
            self.embedding = embedding(config.vocab_size, config.width, tensor)
        elif model_slice.last and self.tied:
            # a tied weight has the same name in the first and in the last stage, so the head is named `embedding`
            self.embedding = Head(config.width, config.vocab_size, tensor)
        if model_slice.layers is None:
            layers = range(len(arch.specs))
        else:
            layers = model_slice.layers
        stack = Stack(arch, layers, config.norm_eps, tensor, recompute, offload, config.residual_multiplier)
        # assigned before `layers`, so that named_parameters() lists shared weights under `shared`
        self.shared = share_weights(stack, arch)
        self.layers = stack
        self.carries_embedding = arch.carries_embedding
        if model_slice.last:
            self.norm = RMSNorm(config.width, config.norm_eps)
            if not self.tied:
                self.head = Head(config.width, config.vocab_size, tensor)
        attach_adapters(self, arch.table, config.adapters, tensor)
        self.table = {name: arch.table[name] for name, _ in self.named_parameters()}

    def forward(
        self,
        tokens_BL: Tensor,
        states: States | None,
        seq: SeqInfo,
        x_LBD: Tensor | None = None,
        logits: bool = True,
    ) -> ModelOut:
        """Run this stage. `x_LBD` is the residual stream from the previous stage; None in the first stage.

        `logits=False` is for callers that multiply by the head's weight themselves, such as a fused loss. If a
        sub-layer reads the embedding, `x_LBD` has the shape (2 * L, B, D): the residual stream for the L tokens, then
        their embedding.
        """
        embedded_LBD = None
        if x_LBD is None:
            x_LBD = self.embedding(tokens_BL)
            x_LBD = x_LBD.to(stream_dtype(x_LBD.dtype, self.residual_fp32))
            x_LBD = multiply(x_LBD, self.embedding_multiplier)
            if not self.slice.last and torch.is_grad_enabled():
                # the next stage sends gradients back, even if all weights of this stage are frozen
                x_LBD.requires_grad_()
            embedded_LBD = x_LBD if self.carries_embedding else None
        elif self.carries_embedding:
            x_LBD, embedded_LBD = x_LBD.chunk(2)
        x_LBD, new_states, aux, routed = self.layers(x_LBD, states, seq, embedded_LBD)
        if not self.slice.last:
            if embedded_LBD is None:
                sent_LBD = x_LBD
            else:
                sent_LBD = torch.cat((x_LBD, embedded_LBD))
            return ModelOut(sent_LBD, new_states, aux, routed)
        x_LBD = multiply(self.norm(x_LBD), 1 / self.logits_scaling)
        if logits:
            x_LBD = functional.linear(gather_input(x_LBD, self.slice.tensor), self.output_weight())
        return ModelOut(x_LBD, new_states, aux, routed)

    def next_logits(self, x_LBD: Tensor) -> Tensor:
        """Return the next token's logits (B, V) over the full vocabulary.

        `x_LBD` is the last stage's output with `logits=False`.
        """
        x_BD = gather_input(x_LBD, self.slice.tensor)[-1]
        return gather_vocabulary(functional.linear(x_BD, self.output_weight()), self.slice.tensor)

    def output_weight(self) -> Tensor:
        """Return this rank's rows of the head's weight. If head and embedding are tied, they share this weight."""
        if self.tied and self.slice.first:
            return self.get_parameter("embedding.weight")
        if self.tied:
            return self.embedding()
        return self.head()

    def cast(self, dtype: torch.dtype) -> LanguageModel:
        """Convert the weights to `dtype`. Weights that the table marks as fp32, such as A_log, get at least fp32."""
        for name, weight in self.named_parameters():
            wide = torch.promote_types(dtype, torch.float32)
            weight.data = weight.data.to(wide if self.table[name].fp32 else dtype)
        return self
