"""The keys of a recipe that describe the model: sizes, the pattern of letters, and what each letter means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from omegaconf import MISSING

from hybridtron.architecture.adapters import AdaptersConfig
from hybridtron.limits import above, at_least


class Start(StrEnum):
    """How projections, embedding and head start: as Mamba's code has it, or as lit-gpt's, for models that are untied.

    mamba: U(+-1/sqrt(inputs)), output projections over sqrt(sub-layers), the embedding N(0, embedding_std^2).
    lit_gpt: N(0, 2 / (5 width)), output projections N(0, 1 / (width blocks^2)); a block is a mixer with its MLP.
    """

    mamba = "mamba"
    lit_gpt = "lit_gpt"


MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Those of Granite, with which rates fit models of several widths; beside them stands `scale` of attention."""


@dataclass
class ModelConfig:
    """The architecture: a pattern of letters, and what each letter means (`kind` and its options)."""

    width: Annotated[int, at_least(1)] = MISSING  # channels of the residual stream
    vocab_size: Annotated[int, at_least(1)] = MISSING  # tokens of the vocabulary; must be at least the tokenizer's
    pattern: str = MISSING  # the order of the sub-layers, one letter each: "(M-W-)*6"
    layers: dict[str, dict[str, Any]] = MISSING  # what each letter means: {M: {kind: mamba}}; options below
    tie_embeddings: bool = True  # the head uses the embedding's weights
    norm_eps: Annotated[float, above(0)] = 1e-5  # added to the mean square in RMSNorm
    residual_fp32: bool = False  # the residual stream is kept and summed in fp32, also where weights are bf16
    embedding_multiplier: Annotated[float, above(0)] = 1.0  # token vectors are multiplied by it, as in Granite
    residual_multiplier: Annotated[float, above(0)] = 1.0  # what each sub-layer adds to the stream is multiplied by it
    logits_scaling: Annotated[float, above(0)] = 1.0  # logits are divided by it
    init: Start = Start.mamba  # how weights are initialized: as in Mamba's public code, or as in lit_gpt
    embedding_std: Annotated[float, above(0)] = 0.02  # standard deviation of the embedding under init=mamba
    # adapters of the phases that say nothing of adapters; a checkpoint's configuration has those of its phase here
    adapters: AdaptersConfig | None = None
