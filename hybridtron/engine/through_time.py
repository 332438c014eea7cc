"""Truncated backpropagation through all chunks of a step: k chunks of the same lanes in one forward pass of a stage.

The chunks run one after another, each from the states that the one before it ended in, undetached: gradients flow back
through all of them, as if each lane's k L tokens were one row. A row that begins a document with a chunk starts that
chunk from zero. Only at the step's borders, where `states.py` keeps the states, are they detached.

A stage sends the outputs of all chunks as one tensor, so that the pipeline sees one micro-batch, and the last stage
takes the loss of all tokens together. With any `parallel.recompute` a chunk keeps the stream and the states that it
starts from, and runs again in backward, so that the activations of one chunk exist at a time however many there are;
inside it, sub-layers are recomputed as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridtron.config.schema import Recompute
from hybridtron.data.batch import Batch
from hybridtron.model.lm import LanguageModel, ModelOut
from hybridtron.model.stack import States
from hybridtron.parallel.linear import TensorGroup


class ChunkOut(NamedTuple):
    """What a stage sends on of a chunk, and its auxiliary losses by name, times its tokens, for the report."""

    output: Tensor
    auxiliary: Mapping[str, Tensor]


class Ended(NamedTuple):
    """What a stage sends on for all chunks, the states that the last one ended in, and the sums of their losses."""

    output: Tensor
    states: States
    auxiliary: Mapping[str, Tensor]


@dataclass(frozen=True)
class ThroughTime:
    """How many chunks a batch holds, how states go from one to the next, and what is sent on of a chunk's output."""

    chunks: int
    handed_over: Callable[[States, Batch], States]
    finished: Callable[[ModelOut, Batch], ChunkOut]

    def run(self, model: LanguageModel, batch: Batch, states: States | None, received: Tensor | None) -> Ended:
        """All chunks of a batch through one chunk of the model, from these states."""
        streams = [None] * self.chunks if received is None else received.chunk(self.chunks)
        outputs = []
        sums: dict[str, Tensor] = {}
        for turn, (piece, x_LBD) in enumerate(zip(batch.chunks(self.chunks), streams, strict=True)):
            if turn:
                assert states is not None
                states = self.handed_over(states, piece)
            if model.recompute is not Recompute.none and torch.is_grad_enabled():
                arguments = (model, piece, states, x_LBD)
                ended = checkpoint(self._one, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                ended = self._one(model, piece, states, x_LBD)
            output, states, losses = ended
            outputs.append(output)
            sums = {name: loss + sums.get(name, 0) for name, loss in losses.items()}
        assert states is not None
        return Ended(torch.cat(outputs), states, sums)

    def _one(self, model: LanguageModel, piece: Batch, states: States | None, x_LBD: Tensor | None) -> Ended:
        out: ModelOut = model(piece.tokens_BL, states, piece.seq, x_LBD, logits=False)
        output, losses = self.finished(out, piece)
        return Ended(output, out.states, losses)


def as_gathered(x_LB: Tensor, chunks: int, tensor: TensorGroup) -> Tensor:
    """Of all tokens, in the order in which those of a stage's output come together.

    Under sequence parallelism a rank holds its share of every chunk, and its shares of all chunks come first.
    """
    ranks = tensor.size if tensor.sequence else 1
    return x_LB.unflatten(0, (chunks, ranks, -1)).transpose(0, 1).flatten(0, 2)
