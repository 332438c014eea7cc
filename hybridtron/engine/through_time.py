"""Truncated backpropagation through all chunks of a step: k chunks per lane in one forward pass.

The chunks run one after another, each from the previous one's final states, without detaching: gradients flow back
through all of them, as if each lane's k L tokens were one row. A row that begins a document with a chunk starts that
chunk from zero. States are detached only between steps, where `states.py` keeps them.

A stage sends all chunks' outputs as one tensor, so that the pipeline sees one micro-batch, and the last stage computes
the loss over all tokens together. With any `parallel.recompute`, a chunk saves only its input stream and initial states
and runs again in backward, so that one chunk's activations exist at a time. Within a chunk, sub-layers are recomputed
as usual.
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
    """A stage's output for one chunk, and its auxiliary losses by name, multiplied by the chunk's loss tokens."""

    output: Tensor
    auxiliary: Mapping[str, Tensor]


class Ended(NamedTuple):
    """A stage's outputs for all chunks, the states after the last one, and the sums of their auxiliary losses."""

    output: Tensor
    states: States
    auxiliary: Mapping[str, Tensor]


@dataclass(frozen=True)
class ThroughTime:
    """Settings for a forward pass with several chunks of the same lanes.

    `chunks` is their number, `handed_over` turns final states into the next chunk's initial ones, and `finished` turns
    a model's output into the tensor to send.
    """

    chunks: int
    handed_over: Callable[[States, Batch], States]
    finished: Callable[[ModelOut, Batch], ChunkOut]

    def run(self, model: LanguageModel, batch: Batch, states: States | None, received: Tensor | None) -> Ended:
        """Run all chunks of a batch through one pipeline stage, from these initial states."""
        if received is None:
            streams = [None] * self.chunks
        else:
            streams = received.chunk(self.chunks)
        outputs = []
        sums: dict[str, Tensor] = {}
        for turn, (piece, x_LBD) in enumerate(zip(batch.chunks(self.chunks), streams, strict=True)):
            if turn:
                assert states is not None
                states = self.handed_over(states, piece)
            if model.recompute is not Recompute.none and torch.is_grad_enabled():
                ended = checkpoint(
                    self._one, model, piece, states, x_LBD, use_reentrant=False, preserve_rng_state=False
                )
            else:
                ended = self._one(model, piece, states, x_LBD)
            output, states, losses = ended
            outputs.append(output)
            sums = {name: loss + sums.get(name, 0) for name, loss in losses.items()}
        assert states is not None
        return Ended(torch.cat(outputs), states, sums)

    def _one(self, model: LanguageModel, piece: Batch, states: States | None, x_LBD: Tensor | None) -> Ended:
        """Run one chunk."""
        out: ModelOut = model(piece.tokens_BL, states, piece.seq, x_LBD, logits=False)
        output, losses = self.finished(out, piece)
        return Ended(output, out.states, losses)


def as_gathered(x_LB: Tensor, chunks: int, tensor: TensorGroup) -> Tensor:
    """Reorder per-token values to match a stage's gathered output, if the stage ran several chunks.

    Under sequence parallelism a rank has its share of every chunk, and gathering concatenates ranks first, chunks
    second.
    """
    ranks = tensor.size if tensor.sequence else 1
    return x_LB.unflatten(0, (chunks, ranks, -1)).transpose(0, 1).flatten(0, 2)
