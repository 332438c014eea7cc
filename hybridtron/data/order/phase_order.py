"""The data order of a phase: which tokens each lane reads in each step.

A lane is a position in the batch; in each step it reads one or more chunks, one after another. With
`data.order=windows` (`windows.py`), rows are shuffled windows from packed documents. With `data.order=lanes`
(`lanes.py`), each lane reads one document after another, so that recurrent states can be carried from step to step
(truncated backpropagation through time).
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridtron.config.batch_ramp import BatchRamp
from hybridtron.config.choices import Documents, Order
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.units import parse_tokens
from hybridtron.data.batch import seed_of
from hybridtron.data.order.lanes import Lanes
from hybridtron.data.order.mixture import Mixture
from hybridtron.data.order.stream import DocumentStream
from hybridtron.data.order.windows import MixedWindows, ShuffledWindows
from hybridtron.data.sources import Sources


@dataclass(frozen=True)
class PhaseOrder:
    """Settings that determine, together with the sources, every token in every step.

    chunks: how many chunks a lane reads in a step. A chunk has seq_len tokens. `global_batch` counts chunks, so there
        are `global_batch / chunks` lanes.
    together: how many consecutive chunks in a lane are computed as one sequence, in one forward pass
    micro_batch: how many lanes a micro-batch has
    batch_ramp: the batch's growth at the start of the phase; None if every step reads the full batch
    """

    kind: Order
    documents: Documents
    seq_len: int
    global_batch: int
    micro_batch: int
    seed: int
    shuffle_tokens: int
    chunks: int = 1
    together: int = 1
    batch_ramp: BatchRamp | None = None

    @staticmethod
    def of(phase: ResolvedPhase) -> PhaseOrder:
        """Return the settings for a resolved phase."""
        settings = phase.settings
        return PhaseOrder(
            phase.order,
            phase.documents,
            settings.seq_len,
            settings.global_batch,
            settings.micro_batch,
            phase_seed(phase.config.run.seed, phase.index),
            parse_tokens(phase.data.shuffle),
            phase.states.chunks,
            phase.chunks_together,
            None if settings.ramp is None else phase.batch_ramp,
        )

    @property
    def lanes(self) -> int:
        """Number of lanes at the full batch size."""
        return self.global_batch // self.chunks

    def lanes_in(self, step: int) -> int:
        """Return how many lanes have a row in a step: fewer than `lanes` while the batch grows."""
        if self.batch_ramp is None:
            return self.lanes
        return self.batch_ramp.rows(step)

    @property
    def tokens_per_lane(self) -> int:
        """Number of input tokens that a lane reads in a step."""
        return self.seq_len * self.chunks


def rows_in_order(sources: Sources, order: PhaseOrder) -> MixedWindows | Lanes:
    """Build the row order. Its method `row(lane, step)` returns the spans of documents that the lane reads."""
    shuffle = order.shuffle_tokens
    seed = order.seed
    stream_seeds = [seed_of(seed, name) for name in sources.names]  # each source is shuffled in a different way
    streams = [
        DocumentStream(store, shuffle, stream_seed)
        for store, stream_seed in zip(sources.stores("train"), stream_seeds, strict=True)
    ]
    if order.kind is Order.lanes:
        joined = order.documents is Documents.join
        return Lanes(streams, sources.weights, order.lanes, order.tokens_per_lane, shuffle, seed, joined)
    windows = [
        ShuffledWindows(stream, order.seq_len, shuffle, stream_seed)
        for stream, stream_seed in zip(streams, stream_seeds, strict=True)
    ]
    batch_ramp = order.batch_ramp or BatchRamp((), order.lanes)
    return MixedWindows(windows, Mixture(sources.weights, order.lanes, seed), batch_ramp)


def phase_seed(seed: int, phase_index: int) -> int:
    """Derive a phase's 64-bit seed from the run's seed, so that two phases read the same data in different orders."""
    return seed_of(seed, str(phase_index))
