"""What a pipeline rank holds of its micro-batches at the peak of the schedule, in bytes.

Between the two passes of a micro-batch every sub-layer of a chunk keeps what it needs (`LayerUse.kept`). The peak is at
the loss, with its logits, or in a backward pass, at the sub-layer for which most is held: what the sub-layers after it
kept is gone, and besides it holds what its own backward pass has made (`LayerUse.back`) and, recomputed, what its
forward pass kept the second time. Of sub-layers whose activations wait on the host, those of two are there at a time.

In a pipeline the schedule holds streams besides, (tokens, width) each:

    1F1B          the gradient that came from the rank after this one, which the whole chunk's backward pass keeps; on
                  all ranks but the first the gradient of the micro-batch before, until the next one is made. While the
                  next forward pass runs, its input too, as its graph goes last.
    interleaved   as that, and always an output that is being sent, and an input that is received ahead. On all ranks
                  but the first also the input of the micro-batch before in backward passes, and the step's first input
                  with its gradient, which a name in the schedule keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybridtron.planning.layer_use import LayerUse
from hybridtron.planning.pipeline import Turn


@dataclass(frozen=True)
class ChunkUse:
    """Sub-layers of one virtual stage."""

    layers: tuple[LayerUse, ...]
    last_norm: int = 0  # values per token that the last norm keeps: its input and output; 0 on all others
    carried: int = 0  # bytes of states between chunks of lanes that run through time

    @property
    def kept(self) -> int:
        """Values per token."""
        return sum(layer.kept for layer in self.layers) + self.last_norm

    def back(self, received: int) -> int:
        """Values per token beyond those kept, at the sub-layer at which the backward pass holds most; 0 at least.

        `received`: what came from the rank after this one. The last sub-layer takes it for its stream's gradient.
        """
        gone = self.last_norm
        most = 0
        before = [0, *(layer.away for layer in self.layers)]
        for index, layer in enumerate(reversed(self.layers)):
            here = layer.away + before[-2 - index]  # of this sub-layer, and of the one that runs backward next
            most = max(most, layer.again + layer.back + here + (received if index else 0) - gone)
            gone += layer.kept
        return most

    @property
    def forward(self) -> int:
        """Values per token beyond those kept, where a forward pass sends to the host what a sub-layer has made."""
        coming = self.kept
        most = 0
        before = 0
        for layer in self.layers:
            coming -= layer.kept
            most = max(most, layer.away + before - coming)
            before = layer.away
        return most


@dataclass(frozen=True)
class RankUse:
    """All virtual stages of a rank, in order."""

    chunks: tuple[ChunkUse, ...]
    value_bytes: int  # of one value for every token of a micro-batch's chunk of a lane
    together: int  # chunks of a lane that run through time in a micro-batch
    runs_again: bool  # whether each of them runs again in the backward pass
    stream: int  # values per token of the residual stream
    width: int
    logits: int  # bytes that the loss makes; 0 where there is none
    head_gradient: int  # bytes of a tied head's gradient, which waits for the embedding's
    rank: int
    ranks: int

    @property
    def kept(self) -> list[int]:
        """Bytes of a micro-batch in each virtual stage."""
        if not self.runs_again:
            return [chunk.kept * self.value_bytes * self.together for chunk in self.chunks]
        ends = [self.width if chunk.last_norm else 0 for chunk in self.chunks]
        return [
            ((self.stream + end) * self.value_bytes + chunk.carried) * self.together
            for chunk, end in zip(self.chunks, ends, strict=True)
        ]

    def peak(self, turns: Sequence[Turn]) -> tuple[int, int]:
        """Bytes that are kept at most; and how much more there is at the peak, than these and the logits."""
        kept = self.kept
        moments = [0]
        different = dict.fromkeys(
            (turn, number > 0) for number, turn in enumerate(turns)
        )  # the schedule repeats itself
        held = {turn: sum(live * size for live, size in zip(turn.live, kept, strict=True)) for turn, _ in different}
        for turn, is_later in different:
            moments += [held[turn] + beside for beside in self._beside(turn, is_later)]
        activations = max(held.values())
        return activations, max(0, max(moments) - activations - self.logits)

    def _beside(self, turn: Turn, is_later: bool) -> Iterator[int]:
        """Beside what is kept, in the forward and in the backward pass of a turn."""
        stream = self.stream * self.value_bytes * self.together
        interleaved = len(self.chunks) > 1
        follows = self.rank > 0
        before = follows and is_later
        sent = (2 + 2 * follows) * interleaved
        if turn.forward is not None and self.chunks[turn.forward].last_norm:
            yield self.logits + (sent + 2 * before) * stream
        if turn.forward is not None and not self.runs_again:
            yield self.chunks[turn.forward].forward * self.value_bytes + (sent + 2 * before) * stream
        if turn.backward is not None:
            chunk = self.chunks[turn.backward]
            if self.ranks > 1 and not chunk.last_norm:
                received = self.stream * self.together
            else:
                received = 0
            made = chunk.back(received) + (chunk.kept if self.runs_again else 0)
            of_head = self.head_gradient if chunk.last_norm else 0
            yield made * self.value_bytes + of_head + (sent + before * (1 + interleaved)) * stream
            # at the end of the pass, when nothing of the chunk is kept: the head's, the embedding's, and their sum
            yield 3 * of_head - self.kept[turn.backward]
