"""The enums of the configuration: keys that choose among names."""

from __future__ import annotations

from enum import StrEnum


class Source(StrEnum):
    """Source of the tokens: a corpus that ships with Python, or a prepared folder, local or at a URL."""

    embedded = "embedded"
    folder = "folder"


class Documents(StrEnum):
    """Isolation of documents packed into one row: kept apart, or joined into one stream."""

    isolate = "isolate"
    join = "join"


class Order(StrEnum):
    """Order in which rows read tokens: shuffled windows of packed text, or lanes that read whole documents in turn."""

    windows = "windows"
    lanes = "lanes"


class Feed(StrEnum):
    """Implementation that turns token rows into batches on the device: torch, or a DALI pipeline."""

    torch = "torch"
    dali = "dali"


class DecaySchedule(StrEnum):
    """Schedule of the weight decay: constant, or proportional to the learning rate."""

    constant = "constant"
    lr = "lr"


class LrPiece(StrEnum):
    """A phase's part in the learning-rate schedule.

    - rewarm: a new schedule, warmed up from the previous phase's last rate to a peak of its own
    - carry_on: the previous phase's schedule continues, as if both phases were one
    - decay: from the previous phase's last rate to a given one
    """

    rewarm = "rewarm"
    carry_on = "carry_on"
    decay = "decay"


class Moments(StrEnum):
    """Treatment of the optimizer's moments where a phase begins."""

    keep = "keep"
    reset = "reset"


class Export(StrEnum):
    """Class of an exported Hugging Face folder: one from transformers, ours, or the former where one fits."""

    auto = "auto"
    native = "native"
    custom = "custom"


class Precision(StrEnum):
    """Number format for weights and activations. Sums, norms and recurrent states stay in fp32.

    The fp8 formats are bf16 except for the large projections, which multiply in FP8. Their scale follows from the
    largest value in the last steps (delayed), in the current tensor (current) or in each tile (block).
    """

    fp32 = "fp32"
    bf16 = "bf16"
    fp8_delayed = "fp8_delayed"
    fp8_current = "fp8_current"
    fp8_block = "fp8_block"


class KeptFormat(StrEnum):
    """Number format in which gradients are accumulated, over micro-batches and ranks, or optimizer state is stored."""

    fp32 = "fp32"
    bf16 = "bf16"


FP8_MULTIPLES = {Precision.fp8_delayed: 16, Precision.fp8_current: 16, Precision.fp8_block: 128}
"""The FP8 precisions, each with the number that must divide the sides of its products."""


class StateMode(StrEnum):
    """Initial state of a training row.

    - zero: zeros
    - random: noise with a given standard deviation
    - fitted: noise with the same mean and variance as the states in which rows end
    - passing: the last state of the previous row in its lane, although that row is another text
    - tbtt: the last state of the previous row in its lane, whose document the row continues
    """

    zero = "zero"
    random = "random"
    fitted = "fitted"
    passing = "passing"
    tbtt = "tbtt"


class StateKind(StrEnum):
    """Kinds of state parts: recurrent states, a convolution's last inputs, attention's keys and values."""

    ssm = "ssm"
    conv = "conv"
    kv = "kv"


class Recompute(StrEnum):
    """Sub-layers that the backward pass recomputes: none, those that mix tokens along the sequence, or all."""

    none = "none"
    selective = "selective"
    layer = "layer"
