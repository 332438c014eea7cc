"""The order of a phase: the tokens that each lane reads in each step, by seed, sources and the phase's sizes.

`windows.py` gives shuffled windows from packed text, for a mixture. In `lanes.py` each lane reads one document after
another, so that a state can be carried along (truncated backpropagation through time).
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridtron.config.choices import Documents, Order
from hybridtron.config.growth import Growth
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

    In a step each lane reads `chunks` times seq_len tokens, which count as `chunks` rows in the global batch. A
    micro-batch holds `together` consecutive chunks from `micro_batch` lanes.
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
    growth: Growth | None = None  # batch growth; None where all rows are read from the start

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
            None if settings.ramp is None else phase.growth,
        )

    @property
    def lanes(self) -> int:
        """Number of lanes at the full batch size."""
        return self.global_batch // self.chunks

    def lanes_in(self, step: int) -> int:
        """Return how many lanes a step reads. The number is smaller while the batch grows."""
        if self.growth is None:
            return self.lanes
        return self.growth.rows(step)

    @property
    def tokens_per_lane(self) -> int:
        """Tokens that a lane reads in one step."""
        return self.seq_len * self.chunks


def rows_in_order(sources: Sources, order: PhaseOrder) -> MixedWindows | Lanes:
    """Build the row order. Its method `row(lane, step)` returns the spans that the lane reads."""
    shuffle = order.shuffle_tokens
    seed = order.seed
    stream_seeds = [seed_of(seed, name) for name in sources.names]  # sources must not be shuffled alike
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
    growth = order.growth or Growth((), order.lanes)
    return MixedWindows(windows, Mixture(sources.weights, order.lanes, seed), growth)


def phase_seed(seed: int, phase_index: int) -> int:
    """Derive a 64-bit seed from the run's seed and the phase, so that phases read the same data in different orders."""
    return seed_of(seed, str(phase_index))
