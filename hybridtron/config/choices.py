"""Enums for configuration keys whose value is one of a few names."""

from __future__ import annotations

from enum import StrEnum


class Source(StrEnum):
    """Source of the training tokens.

    - embedded: text that ships with Python
    - folder: a prepared folder, on the local disk or at a URL
    """

    embedded = "embedded"
    folder = "folder"


class Documents(StrEnum):
    """Treatment of several documents in one row.

    - isolate: attention, convolutions and recurrent states do not cross document boundaries
    - join: the row is read as one text
    """

    isolate = "isolate"
    join = "join"


class Order(StrEnum):
    """Order in which training reads the tokens.

    - windows: packed documents are cut into windows of `seq_len` tokens; the windows are shuffled, and each is one row
    - lanes: each row position in the batch is a lane; over the steps it reads complete documents, one after another
    """

    windows = "windows"
    lanes = "lanes"


class Feed(StrEnum):
    """Implementation that builds batches on the device from rows of token ids: torch, or an NVIDIA DALI pipeline."""

    torch = "torch"
    dali = "dali"


class DecaySchedule(StrEnum):
    """Schedule for the weight decay: constant, or proportional to the learning rate."""

    constant = "constant"
    lr = "lr"


class LrPiece(StrEnum):
    """Relation between a phase's learning rate and the previous phase's.

    - rewarm: a new schedule, which warms up from the previous phase's last rate to the phase's `lr`
    - carry_on: the previous phase's schedule continues, as if both phases were a single phase
    - decay: the rate decays from the previous phase's last rate to the phase's `lr_to`
    """

    rewarm = "rewarm"
    carry_on = "carry_on"
    decay = "decay"


class Moments(StrEnum):
    """Treatment of the optimizer's moments at a phase's start: keep them, or reset them to zero."""

    keep = "keep"
    reset = "reset"


class Export(StrEnum):
    """Model class for an export in Hugging Face's format.

    - auto: native if a class from transformers fits the model, else custom
    - native: a class from transformers; the export fails if no class fits
    - custom: this package's class, whose source files are in the export
    """

    auto = "auto"
    native = "native"
    custom = "custom"


class Precision(StrEnum):
    """Number format for weights and activations. Reductions, norms and recurrent states stay in fp32.

    With an fp8 format, the matmuls in the large projections use FP8, and everything else uses bf16. The scale factors
    of FP8 tensors are computed from largest absolute values:

    - fp8_delayed: a scale factor for each tensor, from the tensor's largest value in the last steps
    - fp8_current: a scale factor for each tensor, from the tensor's largest value now
    - fp8_block: a scale factor for each tile of a tensor, from the tile's largest value now
    """

    fp32 = "fp32"
    bf16 = "bf16"
    fp8_delayed = "fp8_delayed"
    fp8_current = "fp8_current"
    fp8_block = "fp8_block"


class KeptFormat(StrEnum):
    """Number format for accumulated gradients (`precision.gradients`) or optimizer moments (`precision.moments`)."""

    fp32 = "fp32"
    bf16 = "bf16"


FP8_MULTIPLES = {Precision.fp8_delayed: 16, Precision.fp8_current: 16, Precision.fp8_block: 128}
"""FP8 precision -> number that must divide all dimensions of the matrices in FP8 matmuls."""


class StateMode(StrEnum):
    """Initial state of each row in training.

    A lane is one row position in the batch over all steps.

    - zero: zeros
    - random: Gaussian noise with standard deviation `states.sigma`
    - fitted: Gaussian noise with the mean and variance of earlier rows' final states
    - passing: the final state of the lane's previous row, although that row is from another document
    - tbtt: the final state of the lane's previous row, from the same document (truncated backpropagation through time)
    """

    zero = "zero"
    random = "random"
    fitted = "fitted"
    passing = "passing"
    tbtt = "tbtt"


class StateKind(StrEnum):
    """Kinds of state: recurrent states (ssm), convolutions' last inputs (conv), attention's keys and values (kv)."""

    ssm = "ssm"
    conv = "conv"
    kv = "kv"


class Recompute(StrEnum):
    """Activation recomputation in the backward pass.

    - none: no recomputation
    - selective: recompute sub-layers that mix tokens, such as attention and recurrences, but not MLPs
    - layer: recompute all sub-layers
    """

    none = "none"
    selective = "selective"
    layer = "layer"
