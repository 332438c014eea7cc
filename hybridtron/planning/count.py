"""Parameters and FLOPs of a model, and the memory of its loss, computed from the configuration.

FLOPs are an average per token in a row with `seq_len` tokens. A multiply-add counts as 2 FLOPs. The backward pass costs
twice as much as the forward pass, so a training step costs 3 times as much. These parts are counted:

- the projections
- the head, with 2 * width * vocab_size FLOPs, whether its weight is tied to the embedding or not
- attention to the tokens that a token sees: the row's previous tokens within the window
- the convolutions
- each mixer's recurrence (the part `scan`), although its time depends on memory bandwidth rather than on FLOPs

The embedding, norms, activation functions, rotary positions and the optimizer are not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.table import Architecture
from hybridtron.config.choices import FP8_MULTIPLES, Precision
from hybridtron.config.schema import PrecisionConfig

BACKWARD_AND_FORWARD = 3  # FLOPs of a training step divided by FLOPs of its forward pass

VALUE_BYTES = {Precision.fp32: 4, Precision.bf16: 2} | dict.fromkeys(FP8_MULTIPLES, 2)  # bytes per weight or activation
FP32_BYTES = 4

LOGITS_BYTES = 2**28
"""Maximum bytes of logits that the loss computes at a time, on one device.

To save memory, the loss is computed for some of the tokens at a time. Each time, the gradient of the head's weight is
added to an fp32 accumulator. The addition moves about 12 bytes per weight, and the computation has 6 FLOPs per weight
and token. With much fewer tokens at a time, a GPU would spend more time on moving these bytes than on the FLOPs.
"""


@dataclass(frozen=True)
class LayerCount:
    """Counts for one residual sub-layer, which is a norm, a mixer (a scan, attention or an MLP) and an addition.

    letter: the sub-layer's letter in the layer pattern
    parameters: parameters in the mixer and the norm; weights that sub-layers share count only in the first of them
    active: parameters with which a token is computed, fewer than `parameters` only in a layer with experts
    flops: forward FLOPs per token, by part
    """

    letter: str
    kind: str
    options: str
    parameters: int
    active: int
    flops: dict[str, float]

    @property
    def forward_flops(self) -> float:
        """Forward FLOPs per token."""
        return sum(self.flops.values())


@dataclass(frozen=True)
class ModelCount:
    """Counts for the full model at one sequence length.

    embedding, head, norm: parameters in the embedding, in the head (0 if it is tied to the embedding), and in the norm
        before the head
    head_flops: the head's forward FLOPs per token
    """

    layers: tuple[LayerCount, ...]
    seq_len: int
    embedding: int
    head: int
    norm: int
    head_flops: float

    @property
    def parameters(self) -> int:
        """Number of parameters in the model. A weight that embedding and head share counts once."""
        return self.embedding + self.head + self.norm + sum(layer.parameters for layer in self.layers)

    @property
    def active(self) -> int:
        """Number of parameters with which a token is computed. In a layer, only the token's own experts count."""
        return self.parameters - sum(layer.parameters - layer.active for layer in self.layers)

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
        """FLOPs per token in a training step, forward and backward."""
        return BACKWARD_AND_FORWARD * self.forward_flops


def count(arch: Architecture, seq_len: int) -> ModelCount:
    """Count a model's parameters, and its FLOPs at this sequence length."""
    model = arch.model
    layers = tuple(
        LayerCount(
            letter=letter,
            kind=spec.kind,
            options=spec.describe(),
            parameters=_parameters(spec, arch.sizes, letter in arch.letters[:index]),
            active=_parameters(spec, arch.sizes, letter in arch.letters[:index], active=True),
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


def _parameters(spec: MixerSpec, sizes: ModelSizes, is_later: bool, active: bool = False) -> int:
    """Return how many parameters a sub-layer and its norm have.

    is_later: whether an earlier sub-layer has the same letter. Weights that the two share are then not counted.
    active: count only parameters with which a token is computed
    """
    counted = [weight for weight in spec.parameters(sizes).values() if not (weight.shared and is_later)]
    sizes_of = (weight.active_size if active else weight.size for weight in counted)
    return sizes.width * spec.has_norm + sum(sizes_of)


def logits_at_a_time(tokens: int, vocabulary: int, value_bytes: int) -> int:
    """Return the number of tokens for which the loss computes logits at a time.

    vocabulary: vocabulary size, or the size of the rank's vocabulary shard
    """
    most = max(1, LOGITS_BYTES // (vocabulary * value_bytes))
    return -(-tokens // -(-tokens // most))


def loss_bytes(tokens: int, width: int, vocabulary: int, value_bytes: int, learns: bool = True) -> int:
    """Return the loss's peak memory on one device, in bytes.

    tokens: how many tokens the rank has in one pass
    vocabulary: size of the rank's vocabulary shard
    learns: whether the head's weight is trained

    The memory holds the logits, and the gradients of the head's input and of the head's weight. If the logits are
    computed in several parts, the weight's gradient is accumulated in fp32. The sum is converted to the compute dtype
    after the last part, when the logits are already freed.
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
    """Return the bytes per element in an optimizer's moments."""
    return VALUE_BYTES[Precision(precision.moments)]


def gradient_bytes(precision: PrecisionConfig, weight_is_fp32: bool) -> int:
    """Return the bytes per element of a gradient, in the dtype in which micro-batches are accumulated."""
    is_wide = weight_is_fp32 or "fp32" in (precision.name, precision.gradients)
    if is_wide:
        return FP32_BYTES
    return VALUE_BYTES[precision.name]
