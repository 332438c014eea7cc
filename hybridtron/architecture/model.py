"""Recipe keys that describe the model: sizes, the pattern of letters, and each letter's mixer.

A recipe is a run's YAML configuration. Each letter in the pattern is one residual sub-layer: norm, mixer (such as
attention, a state-space recurrence or an MLP), and addition to the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from omegaconf import MISSING

from hybridtron.architecture.adapters import AdaptersConfig
from hybridtron.architecture.mup import MupConfig
from hybridtron.limits import above, at_least


class Start(StrEnum):
    """Initialisation of projections, embedding and head: as in Mamba's code, or as in lit-gpt's code.

                              mamba                                    lit_gpt
        projections, head     uniform, +-1/sqrt(inputs)                normal, variance 2 / (5 * width)
        output projections    uniform, +-1/sqrt(inputs * layers)       normal, variance 1 / (width * blocks^2)
        embedding             normal, variance embedding_std^2         normal, variance 2 / (5 * width)

    An output projection is the last projection in a sub-layer. `inputs` counts a projection's inputs, and `layers`
    counts the sub-layers in the model. `blocks` counts all sub-layers except MLPs and parallel branches.
    """

    mamba = "mamba"
    lit_gpt = "lit_gpt"


MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Keys of the multipliers in Granite models; with suitable values, one learning rate fits several widths.

Granite's fourth multiplier is the option `scale` of attention mixers.
"""


@dataclass
class ModelConfig:
    """The architecture: a pattern of letters, and each letter's mixer (`kind` and its options)."""

    width: Annotated[int, at_least(1)] = MISSING  # channels of the residual stream
    # number of tokens in the vocabulary; must be at least the tokenizer's number of tokens
    vocab_size: Annotated[int, at_least(1)] = MISSING
    pattern: str = MISSING  # the order of the sub-layers, with one letter for each sub-layer, such as "(M-W-)*6"
    layers: dict[str, dict[str, Any]] = MISSING  # the mixer of each letter: {M: {kind: mamba}}; options below
    tie_embeddings: bool = True  # the head uses the embedding's weights
    norm_eps: Annotated[float, above(0)] = 1e-5  # added to the mean square in RMSNorm
    residual_fp32: bool = False  # keep and sum the residual stream in fp32, even with bf16 weights
    embedding_multiplier: Annotated[float, above(0)] = 1.0  # factor of the token embeddings, as in Granite
    residual_multiplier: Annotated[float, above(0)] = 1.0  # factor of every sub-layer's output
    logits_scaling: Annotated[float, above(0)] = 1.0  # divisor of the logits
    init: Start = Start.mamba  # how weights are initialised: as in Mamba's or in lit-gpt's public code
    embedding_std: Annotated[float, above(0)] = 0.02  # standard deviation of the embedding under init=mamba
    mup: MupConfig = field(default_factory=MupConfig)
    # low-rank adapters, used in phases that set no adapters of their own; in a checkpoint's configuration, the adapters
    # of its phase
    adapters: AdaptersConfig | None = None
