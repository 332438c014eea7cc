"""Recipe keys that describe the model: sizes, the pattern of letters, and each letter's mixer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from omegaconf import MISSING

from hybridtron.architecture.adapters import AdaptersConfig
from hybridtron.limits import above, at_least


class Start(StrEnum):
    """Initialisation of projections, embedding and head: as in Mamba's code, or as in lit-gpt's for untied models.

    mamba: U(+-1/sqrt(inputs)), output projections over sqrt(sub-layers), the embedding N(0, embedding_std^2).
    lit_gpt: N(0, 2 / (5 width)), output projections N(0, 1 / (width blocks^2)); a block is a mixer with its MLP.
    """

    mamba = "mamba"
    lit_gpt = "lit_gpt"


MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Granite's multipliers, with which one learning rate fits several widths; attention has a fourth, `scale`."""


@dataclass
class ModelConfig:
    """The architecture: a pattern of letters, and each letter's mixer (`kind` and its options)."""

    width: Annotated[int, at_least(1)] = MISSING  # channels of the residual stream
    vocab_size: Annotated[int, at_least(1)] = MISSING  # tokens of the vocabulary; must be at least the tokenizer's
    pattern: str = MISSING  # the order of the sub-layers, one letter each: "(M-W-)*6"
    layers: dict[str, dict[str, Any]] = MISSING  # the mixer of each letter: {M: {kind: mamba}}; options below
    tie_embeddings: bool = True  # the head uses the embedding's weights
    norm_eps: Annotated[float, above(0)] = 1e-5  # added to the mean square in RMSNorm
    residual_fp32: bool = False  # keep and sum the residual stream in fp32, even with bf16 weights
    embedding_multiplier: Annotated[float, above(0)] = 1.0  # factor of the token embeddings, as in Granite
    residual_multiplier: Annotated[float, above(0)] = 1.0  # factor of every sub-layer's output
    logits_scaling: Annotated[float, above(0)] = 1.0  # divisor of the logits
    init: Start = Start.mamba  # how weights are initialized: as in Mamba's public code, or as in lit_gpt
    embedding_std: Annotated[float, above(0)] = 0.02  # standard deviation of the embedding under init=mamba
    # adapters of phases without adapters of their own; a checkpoint's configuration has its phase's adapters here
    adapters: AdaptersConfig | None = None
