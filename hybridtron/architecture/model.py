"""The keys of a recipe that describe the model: sizes, the pattern of letters, and what each letter means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from omegaconf import MISSING


class Start(StrEnum):
    """How projections, embedding and head start: as Mamba's code has it, or as lit-gpt's, for models that are untied.

    mamba: U(+-1/sqrt(inputs)), output projections over sqrt(sub-layers), the embedding N(0, embedding_std^2).
    lit_gpt: N(0, 2 / (5 width)), output projections N(0, 1 / (width blocks^2)); a block is a mixer with its MLP.
    """

    mamba = "mamba"
    lit_gpt = "lit_gpt"


@dataclass
class ModelConfig:
    """The architecture: a pattern of letters, and what each letter means (`kind` and its options)."""

    width: int = MISSING
    vocab_size: int = MISSING
    pattern: str = MISSING
    layers: dict[str, dict[str, Any]] = MISSING
    tie_embeddings: bool = True
    norm_eps: float = 1e-5
    residual_fp32: bool = False  # the stream between sub-layers is kept and summed in fp32, also where weights are bf16
    init: Start = Start.mamba
    embedding_std: float = 0.02  # of init=mamba
