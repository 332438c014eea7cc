"""Readers: models prepared for inference, on one process or divided over ranks.

A reader takes tokens and the states before the tokens: keys and values, and the states of recurrences and convolutions.
It returns results (such as logits) and the states after the tokens.

Legend: B rows (sequences), L tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.inference.compiled_decode import CompiledDecode, NextLogits, unsupported_reason
from hybridtron.model.lm import LanguageModel
from hybridtron.model.stack import States
from hybridtron.parallel.mesh import ONE_RANK, RankGroup

Read = Callable[[Tensor, States | None, SeqInfo], tuple[Tensor, States]]
"""Function from tokens (B, L) and states to the next token's logits (B, V) and the states after the tokens."""


class Readout(NamedTuple):
    """Description of a result that every rank gets, such as logits.

    make         computes the result from the last stage and its output (L, B, D)
    shape        the result's shape
    dtype        the result's dtype
    of_tokens    function from a slice of the tokens to the Readout for this slice, if the result's first axis is
                 tokens; None if the result depends only on the last token
    """

    make: Callable[[LanguageModel, Tensor], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    of_tokens: Callable[[slice], Readout] | None = None


EMPTY_READOUT = Readout(lambda stage, x_LBD: x_LBD.new_zeros(1, dtype=torch.float32), (1,), torch.float32)
"""Readout that discards the outputs, for callers that need only the states."""


Forward = Callable[[Tensor, States | None, SeqInfo, Readout], tuple[Tensor, States]]
"""Function from tokens (B, L), states and a Readout to the Readout's result and this rank's states after the tokens."""


def unchanged(by_layer: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the layers' results unchanged, since one process has all of them."""
    return by_layer


@dataclass(frozen=True)
class Reader:
    """A model for inference: the full model on this process (`reader`), or this rank's part (`parallel_reader.py`).

    `parts` are the pipeline stages that this process computes. `context` is the group of ranks that divide the tokens.
    `gather_layers` takes {layer index: result} for this rank's layers, and returns the same for all layers. A result
    has heads or channels on its first axis. All ranks that share the model must call `gather_layers` together.
    """

    forward: Forward
    parts: Sequence[LanguageModel]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    gather_layers: Callable[[dict[int, Tensor]], dict[int, Tensor]] = unchanged
    model: LanguageModel | None = None  # the full model, if this process has it
    context: RankGroup = ONE_RANK

    def read(self, tokens_BL: Tensor, states: States | None, seq: SeqInfo) -> tuple[Tensor, States]:
        """Read tokens; return the next token's logits (B, V) and the states after the tokens."""
        logits_BV = Readout(LanguageModel.next_logits, (len(tokens_BL), self.vocab_size), self.dtype)
        return self.forward(tokens_BL, states, seq, logits_BV)

    def steps(self, states: States, positions_B: Tensor) -> NextLogits:
        """Return a function that continues rows from their states by one token per call.

        `positions_B` says how many tokens each row has read. Small models on a CPU get a compiled function.
        """
        if self.model is not None and unsupported_reason(self.model) is None:
            return CompiledDecode(self.model, states, positions_B)
        generated = 0

        def following(tokens_B: Tensor) -> Tensor:
            nonlocal states, generated
            logits_BV, states = self.read(tokens_B[:, None], states, SeqInfo((positions_B + generated)[:, None]))
            generated += 1
            return logits_BV

        return following


def reader(model: LanguageModel) -> Reader:
    """Return a reader for a full model on this process."""

    def forward(tokens_BL: Tensor, states: States | None, seq: SeqInfo, readout: Readout) -> tuple[Tensor, States]:
        x_LBD, states, *_ = model(tokens_BL, states, seq, logits=False)
        return readout.make(model, x_LBD), states

    weight_VD = model.output_weight()
    return Reader(forward, [model], len(weight_VD), weight_VD.dtype, weight_VD.device, model=model)


def reset_rows(states: States, rows_B: Tensor) -> States:
    """Return the states, set to zero in the rows where `rows_B` is True, as at a document's start."""
    return {
        layer: {name: part.masked_fill(rows_B.view(-1, *[1] * (part.dim() - 1)), 0) for name, part in state.items()}
        for layer, state in states.items()
    }


def state_bytes(states: States) -> int:
    """Return how many bytes all layers' states take."""
    return sum(part.numel() * part.element_size() for state in states.values() for part in state.values())
