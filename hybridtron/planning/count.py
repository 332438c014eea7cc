"""Parameters and FLOPs of a configuration, known without building it; bytes of gradients, moments and the loss.

FLOPs are per token of a sequence of `seq_len`, a multiply-add counting 2; training costs 3 times the forward pass
(once for the values, twice for the gradients). Counted are the projections, the head (2 width vocab_size, tied or
not), attention over the positions that a token really sees (causal, within its window), the convolutions, and the
recurrence of each mixer (the part `scan`, which is elementwise: it is bound by memory, not by arithmetic). Not
counted are the embedding, which is a lookup, and norms, activations, rotary positions and the optimizer, which are
far below 1% together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.choices import FP8_MULTIPLES, Precision
from hybridtron.config.schema import PrecisionConfig

BACKWARD_AND_FORWARD = 3

VALUE_BYTES = {Precision.fp32: 4, Precision.bf16: 2} | dict.fromkeys(FP8_MULTIPLES, 2)
FP32_BYTES = 4
"""Bytes of a weight or an activation in the computing type, by precision; and of values that stay in fp32."""

LOGITS_BYTES = 2**28
"""Bytes of logits that the loss makes at a time, on one device.

Each time costs a sum over the gradient of the head's weight: 12 bytes of traffic per weight in bf16 against 6 FLOPs per
weight and token, so a thousand tokens are too few for a GPU.
"""


@dataclass(frozen=True)
class LayerCount:
    """One residual sub-layer: its mixer, its parameters including its norm's, and its forward FLOPs per token by part.

    Weights shared by the places of a letter count at the first of them.
    """

    letter: str
    kind: str
    options: str
    parameters: int
    flops: dict[str, float]

    @property
    def forward_flops(self) -> float:
        """Forward FLOPs per token."""
        return sum(self.flops.values())


@dataclass(frozen=True)
class ModelCount:
    """The whole model at one sequence length: sub-layers, embedding, last norm and head."""

    layers: tuple[LayerCount, ...]
    seq_len: int
    embedding: int  # parameters of the embedding
    head: int  # parameters of the head, 0 when it is tied to the embedding
    norm: int  # parameters of the last norm
    head_flops: float  # forward, per token

    @property
    def parameters(self) -> int:
        """Parameters of the model; a tied head counts once."""
        return self.embedding + self.head + self.norm + sum(layer.parameters for layer in self.layers)

    @property
    def flops_by_part(self) -> dict[str, float]:
        """Forward FLOPs per token, summed over the sub-layers, by part."""
        parts: Counter[str] = Counter()
        for layer in self.layers:
            parts.update(layer.flops)
        return {**parts, "head": self.head_flops}

    @property
    def forward_flops(self) -> float:
        """Forward FLOPs per token."""
        return self.head_flops + sum(layer.forward_flops for layer in self.layers)

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token of a training step, forward and backward."""
        return BACKWARD_AND_FORWARD * self.forward_flops


def count(model: ModelConfig, seq_len: int) -> ModelCount:
    """Count parameters and FLOPs of a model whose options are checked."""
    arch = architecture(model)
    layers = tuple(
        LayerCount(
            letter=letter,
            kind=spec.kind,
            options=spec.describe(),
            parameters=_parameters(spec, arch.sizes, letter in arch.letters[:index]),
            flops={part: flops for part, flops in spec.flops(arch.sizes, seq_len).items() if flops},
        )
        for index, (letter, spec) in enumerate(zip(arch.letters, arch.specs, strict=True))
    )
    matrix = model.vocab_size * model.width
    return ModelCount(
        layers=layers,
        seq_len=seq_len,
        embedding=matrix,
        head=0 if model.tie_embeddings else matrix,
        norm=model.width,
        head_flops=2 * matrix,
    )


def _parameters(spec: MixerSpec, sizes: ModelSizes, is_later: bool) -> int:
    """Count a sub-layer's parameters with its norm's; a later place of a letter leaves out the shared ones."""
    own = (weight for weight in spec.parameters(sizes).values() if not (weight.shared and is_later))
    return sizes.width * spec.has_norm + sum(weight.size for weight in own)


def logits_at_a_time(tokens: int, vocabulary: int, value_bytes: int) -> int:
    """Return how many tokens' logits the loss makes at a time; the last time at most as many."""
    most = max(1, LOGITS_BYTES // (vocabulary * value_bytes))
    return -(-tokens // -(-tokens // most))


def loss_bytes(tokens: int, width: int, vocabulary: int, value_bytes: int, learns: bool = True) -> int:
    """Return the bytes that the loss holds for these tokens and one device's part of the vocabulary.

    The gradient of the head's weight, if it learns, is added up in fp32 where it is made in several parts. It is
    narrowed after the last of them, when no logits are left.
    """
    at_a_time = logits_at_a_time(tokens, vocabulary, value_bytes)
    several = at_a_time < tokens
    weights = vocabulary * width * learns
    sums = value_bytes * tokens * width + (FP32_BYTES if several else value_bytes) * weights
    if several and value_bytes < FP32_BYTES:
        narrowed = value_bytes * weights
    else:
        narrowed = 0
    return sums + max(value_bytes * at_a_time * vocabulary, narrowed)


def moment_bytes(precision: PrecisionConfig) -> int:
    """Return the bytes of one entry of an optimizer's state."""
    return VALUE_BYTES[Precision(precision.moments)]


def gradient_bytes(precision: PrecisionConfig, weight_is_fp32: bool) -> int:
    """Return the bytes of one entry of a gradient in the format in which it is added up."""
    is_wide = weight_is_fp32 or "fp32" in (precision.name, precision.gradients)
    if is_wide:
        return FP32_BYTES
    return VALUE_BYTES[precision.name]
