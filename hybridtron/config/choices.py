"""What keys of the configuration that choose among names can be set to."""

from __future__ import annotations

from enum import StrEnum


class Source(StrEnum):
    """Where the tokens come from: the corpus that ships with Python itself, or prepared tokens, here or at a URL."""

    embedded = "embedded"
    folder = "folder"


class Documents(StrEnum):
    """Whether documents packed into one row are kept apart, or the row is one stream."""

    isolate = "isolate"
    join = "join"


class Order(StrEnum):
    """Which tokens a row reads: shuffled windows of the packed text, or, lane by lane, one document after another."""

    windows = "windows"
    lanes = "lanes"


class Feed(StrEnum):
    """What turns rows of tokens into batches on the device: torch, or a DALI pipeline."""

    torch = "torch"
    dali = "dali"


class DecaySchedule(StrEnum):
    """The weight decay over a run: always the same, or a peak that falls and rises with the learning rate."""

    constant = "constant"
    lr = "lr"


class LrPiece(StrEnum):
    """The piece of the learning rate's course that a phase is.

    A new one, warmed up from where the phase before ended to a peak of its own; more of that of the phase before, as
    though the two were one; or from where that ended down to a given rate.
    """

    rewarm = "rewarm"
    carry_on = "carry_on"
    decay = "decay"


class Moments(StrEnum):
    """What becomes of the optimizer's moments where a phase begins."""

    keep = "keep"
    reset = "reset"


class Export(StrEnum):
    """The class that a Hugging Face folder is of: one of transformers' own, ours, or its own where one fits."""

    auto = "auto"
    native = "native"
    custom = "custom"


class Precision(StrEnum):
    """What weights and activations are computed in; sums, norms and recurrent states stay in fp32.

    Those with fp8 are bf16 but for the large projections, which multiply in FP8: scaled by the greatest value of the
    last steps (delayed), by each tensor's own (current), or by that of each tile (block).
    """

    fp32 = "fp32"
    bf16 = "bf16"
    fp8_delayed = "fp8_delayed"
    fp8_current = "fp8_current"
    fp8_block = "fp8_block"


class KeptFormat(StrEnum):
    """What gradients are added up in, over micro-batches and ranks, and what an optimizer's state is kept in."""

    fp32 = "fp32"
    bf16 = "bf16"


FP8_MULTIPLES = {Precision.fp8_delayed: 16, Precision.fp8_current: 16, Precision.fp8_block: 128}
"""The precisions that multiply in FP8, and of what the sides of such a product must be multiples."""


class StateMode(StrEnum):
    """What a training row's recurrent state starts from.

    zero; noise, of a given size or fitted to the states that rows end in; the state in which the row before it in its
    lane ended, though that is another text (passing), or the same text continued (tbtt).
    """

    zero = "zero"
    random = "random"
    fitted = "fitted"
    passing = "passing"
    tbtt = "tbtt"


class StateKind(StrEnum):
    """The kinds of carried tensors: recurrent states, tails of convolutions, keys and values of attention."""

    ssm = "ssm"
    conv = "conv"
    kv = "kv"


class Recompute(StrEnum):
    """What the backward pass computes again: nothing, the sub-layers that look along the sequence, or every one."""

    none = "none"
    selective = "selective"
    layer = "layer"
