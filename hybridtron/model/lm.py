"""The language model, or one chunk of it: embedding, sub-layers, norm, head. States go in and out beside the tokens."""

from __future__ import annotations

from dataclasses import dataclass
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
from hybridtron.parallel.cut import Mesh
from hybridtron.parallel.embedding import embedding
from hybridtron.parallel.linear import SINGLE_RANK, TensorGroup, enter
from hybridtron.parallel.loss import Head, whole_vocabulary


@dataclass(frozen=True)
class ModelSlice:
    """Which part of the model is built: these sub-layers (None: all), with or without its ends, one tensor share."""

    layers: range | None = None
    first: bool = True
    last: bool = True
    tensor: TensorGroup = SINGLE_RANK

    @property
    def mesh(self) -> Mesh:
        """The dimensions over which its weights are cut."""
        return {"tensor": self.tensor}


FULL_MODEL = ModelSlice()


def stream_dtype(computed: torch.dtype, residual_fp32: bool) -> torch.dtype:
    """What the residual stream is kept and summed in, between sub-layers and between pipeline stages."""
    return torch.promote_types(computed, torch.float32) if residual_fp32 else computed


class ModelOut(NamedTuple):
    """Logits (L, B, V) of the last chunk, this rank's share of the vocabulary; the stream (L, B, D) of any other.

    Without logits, the last chunk's is the stream too, normed and scaled: what `output_weight` is multiplied with.
    Beside them the states after the last token, and the mixers' auxiliary losses by name.
    """

    output: Tensor
    states: States
    aux: dict[str, Tensor]


class LanguageModel(nn.Module):
    """Weights are uninitialised until `model/init.py` or a checkpoint fills them."""

    def __init__(
        self,
        config: ModelConfig,
        model_slice: ModelSlice = FULL_MODEL,
        recompute: Recompute = Recompute.none,
        offload: int = 0,
    ) -> None:
        super().__init__()
        arch, tensor = architecture(config), model_slice.tensor
        self.slice, self.recompute = model_slice, recompute
        self.tied, self.residual_fp32 = config.tie_embeddings, config.residual_fp32
        self.embedding_multiplier, self.logits_scaling = config.embedding_multiplier, config.logits_scaling
        if model_slice.first:
            self.embedding = embedding(config.vocab_size, config.width, tensor)
        elif model_slice.last and self.tied:
            self.embedding = Head(config.width, config.vocab_size, tensor)
        layers = range(len(arch.specs)) if model_slice.layers is None else model_slice.layers
        stack = Stack(arch, layers, config.norm_eps, tensor, recompute, offload, config.residual_multiplier)
        self.shared, self.layers = share_weights(stack, arch), stack  # in this order: see model/shared
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
        """`x_LBD` is the stream from the chunk before, where there is one. A loss is taken without `logits`.

        Where a sub-layer reads the embedding, it goes from chunk to chunk as rows behind those of the stream.
        """
        embedded_LBD = None
        if x_LBD is None:
            x_LBD = self.embedding(tokens_BL)
            x_LBD = x_LBD.to(stream_dtype(x_LBD.dtype, self.residual_fp32))
            x_LBD = multiplied(x_LBD, self.embedding_multiplier)
            if not self.slice.last and torch.is_grad_enabled():
                # gradients come back from the next chunk, though no weight of this one may learn
                x_LBD.requires_grad_()
            embedded_LBD = x_LBD if self.carries_embedding else None
        elif self.carries_embedding:
            x_LBD, embedded_LBD = x_LBD.chunk(2)
        x_LBD, new_states, aux = self.layers(x_LBD, states, seq, embedded_LBD)
        if not self.slice.last:
            sent_LBD = x_LBD if embedded_LBD is None else torch.cat((x_LBD, embedded_LBD))
            return ModelOut(sent_LBD, new_states, aux)
        x_LBD = multiplied(self.norm(x_LBD), 1 / self.logits_scaling)
        if logits:
            x_LBD = functional.linear(enter(x_LBD, self.slice.tensor), self.output_weight())
        return ModelOut(x_LBD, new_states, aux)

    def next_logits(self, x_LBD: Tensor) -> Tensor:
        """Of the token after the last one of `x_LBD`, the last stage's output without logits: (B, V), the whole V."""
        x_BD = enter(x_LBD, self.slice.tensor)[-1]
        return whole_vocabulary(functional.linear(x_BD, self.output_weight()), self.slice.tensor)

    def output_weight(self) -> Tensor:
        """The head's weight, which is the embedding's where the two are tied."""
        if self.tied and self.slice.first:
            return self.get_parameter("embedding.weight")
        return self.embedding() if self.tied else self.head()

    def cast(self, dtype: torch.dtype) -> LanguageModel:
        """Compute in `dtype`; what the table marks fp32 (A_log, D, dt bias) stays in fp32 at least."""
        for name, weight in self.named_parameters():
            wide = torch.promote_types(dtype, torch.float32)
            weight.data = weight.data.to(wide if self.table[name].fp32 else dtype)
        return self
