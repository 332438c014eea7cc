"""Forward pass through several chunks of each row, for `states.through_time` (truncated backpropagation through time).

A micro-batch holds k chunks of L tokens for each row. The chunks run one after another. Each chunk starts from the
previous chunk's final states, or from zero states in rows where a document begins. The states are not detached between
chunks, so gradients flow back through all k chunks. They are detached only between steps (`states.py`).

A pipeline stage concatenates the outputs of all chunks and sends them as one tensor. So the pipeline schedule treats
the chunks as one micro-batch, and the last stage computes the loss over all tokens together. Unless
`parallel.recompute` is `none`, each chunk is checkpointed: it saves only its input and initial states, and runs again
in the backward pass. Then only one chunk's activations exist at a time.
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
from hybridtron.mixers.base import Routed
from hybridtron.model.lm import LanguageModel, ModelOut
from hybridtron.model.stack import States
from hybridtron.parallel.linear import TensorGroup


class ChunkOutput(NamedTuple):
    """A stage's output for one chunk.

    auxiliary: the mixers' auxiliary losses by name, multiplied by the chunk's number of loss tokens
    routed: the choices of each router in the stage, by its sub-layer's index
    """

    output: Tensor
    auxiliary: Mapping[str, Tensor]
    routed: Mapping[int, Routed]


class StageOutput(NamedTuple):
    """A stage's output for a micro-batch.

    output: all chunks' outputs, concatenated
    states: the last chunk's final states
    auxiliary: the mixers' auxiliary losses by name, multiplied by loss tokens and summed over the chunks
    routed: the choices of each router in the stage, by its sub-layer's index, summed over the chunks
    """

    output: Tensor
    states: States
    auxiliary: Mapping[str, Tensor]
    routed: Mapping[int, Routed]


@dataclass(frozen=True)
class MultiChunkForward:
    """A forward pass in one stage through several chunks of each row.

    chunks: how many chunks each row has
    next_chunk_states: function from a chunk's final states and the next chunk to the next chunk's initial states
    finish_output: function from the model's output and the chunk to a `ChunkOutput`
    """

    chunks: int
    next_chunk_states: Callable[[States, Batch], States]
    finish_output: Callable[[ModelOut, Batch], ChunkOutput]

    def run(self, model: LanguageModel, batch: Batch, states: States | None, received: Tensor | None) -> StageOutput:
        """Run all chunks of a micro-batch through one pipeline stage.

        states: initial states for the first chunk; None for zero
        received: the previous stage's outputs for all chunks, concatenated; None on the first stage
        """
        if received is None:
            streams = [None] * self.chunks
        else:
            streams = received.chunk(self.chunks)
        outputs = []
        sums: dict[str, Tensor] = {}
        routed: dict[int, Routed] = {}
        for turn, (piece, x_LBD) in enumerate(zip(batch.chunks(self.chunks), streams, strict=True)):
            if turn:
                assert states is not None
                states = self.next_chunk_states(states, piece)
            if model.recompute is not Recompute.none and torch.is_grad_enabled():
                # the model draws random numbers only from the batch's key, so no generator's state must be restored
                stage_output = checkpoint(
                    self._run_chunk, model, piece, states, x_LBD, use_reentrant=False, preserve_rng_state=False
                )
            else:
                stage_output = self._run_chunk(model, piece, states, x_LBD)
            output, states, losses, chosen = stage_output
            outputs.append(output)
            routed = {index: added_choices(routed.get(index), choices) for index, choices in chosen.items()}
            sums = {name: loss + sums.get(name, 0) for name, loss in losses.items()}
        assert states is not None
        return StageOutput(torch.cat(outputs), states, sums, routed)

    def _run_chunk(
        self, model: LanguageModel, piece: Batch, states: States | None, x_LBD: Tensor | None
    ) -> StageOutput:
        out: ModelOut = model(piece.tokens_BL, states, piece.seq, x_LBD, logits=False)
        output, losses, routed = self.finish_output(out, piece)
        return StageOutput(output, out.states, losses, routed)


def added_choices(before: Routed | None, routed: Routed) -> Routed:
    """Return the sum of a router's counts in two chunks; None stands for zero."""
    if before is None:
        return routed
    return Routed(*(one + other for one, other in zip(before, routed, strict=True)))


def to_gathered_order(x_LB: Tensor, chunks: int, tensor: TensorGroup) -> Tensor:
    """Reorder labels or masks (L, B) to match the token order in a stage's all-gathered output.

    With sequence parallelism each rank has a part from every chunk. The all-gather concatenates the ranks' outputs, so
    the token order is (rank, chunk, token), and not (chunk, rank, token).
    """
    ranks = tensor.size if tensor.sequence else 1
    return x_LB.unflatten(0, (chunks, ranks, -1)).transpose(0, 1).flatten(0, 2)
