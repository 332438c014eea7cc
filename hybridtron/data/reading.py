"""Which tokens each lane reads in each step: a pure function of the seed, the sources and the sizes of a phase.

`windows`: shuffled windows of the packed text, of a mixture of sources. `lanes`: each lane walks one document after
another, so that a state can be carried along (truncated backpropagation through time).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hybridtron.config.growth import Growth
from hybridtron.config.schema import Config, Documents, Order
from hybridtron.config.units import parse_tokens
from hybridtron.data.batch import seed_of
from hybridtron.data.order.lanes import Lanes
from hybridtron.data.order.mixture import Mixture
from hybridtron.data.order.stream import DocumentStream, ShuffledWindows
from hybridtron.data.rows import RowSpans
from hybridtron.data.sources import Sources


@dataclass(frozen=True)
class Reading:
    """How the rows of a phase are put together; with the sources it determines every token of every step.

    Each of the `lanes` reads `chunks` times seq_len tokens in a step, which make as many rows of the global batch. A
    micro-batch holds one chunk of some lanes, or all of them where they are run `together`.
    """

    order: Order
    documents: Documents
    seq_len: int
    global_batch: int
    micro_batch: int
    seed: int
    shuffle_tokens: int
    chunks: int = 1
    together: int = 1
    growth: Growth | None = None  # of the batch, where it does not have all its rows from the start

    @staticmethod
    def of(config: Config, phase_index: int) -> Reading:
        phase = config.phases[phase_index]
        seed, shuffle = phase_seed(config.run.seed, phase_index), parse_tokens(config.data.shuffle)
        return Reading(
            config.order_of(phase),
            config.documents_of(phase),
            phase.seq_len,
            phase.global_batch,
            phase.micro_batch,
            seed,
            shuffle,
            config.states_of(phase).chunks,
            config.chunks_together(phase),
            None if phase.ramp is None else Growth.of(phase),
        )

    @property
    def lanes(self) -> int:
        return self.global_batch // self.chunks

    def lanes_in(self, step: int) -> int:
        """That a step reads; fewer than there will be while the batch grows."""
        return self.lanes if self.growth is None else self.growth.rows(step)

    @property
    def tokens_per_lane(self) -> int:
        """That one step reads."""
        return self.seq_len * self.chunks


class LaneOrder(Protocol):
    """(lane, step) -> the row that the lane reads."""

    def row(self, lane: int, step: int) -> RowSpans: ...


def lane_order(sources: Sources, reading: Reading) -> LaneOrder:
    return WalkingLanes(sources, reading) if reading.order is Order.lanes else ShuffledLanes(sources, reading)


def _streams(sources: Sources, reading: Reading) -> list[DocumentStream]:
    return [
        DocumentStream.of(store, reading.shuffle_tokens, seed_of(reading.seed, name))
        for name, store in zip(sources.names, sources.stores("train"), strict=True)
    ]


class ShuffledLanes:
    """Lane i of step s is row n + i of the mixture, n being all rows before: a shuffled window of one source."""

    def __init__(self, sources: Sources, reading: Reading) -> None:
        self._growth = reading.growth or Growth((), reading.lanes)
        self._mixture = Mixture(sources.weights, reading.lanes, reading.seed)
        self._windows = [
            ShuffledWindows(stream, reading.seq_len, reading.shuffle_tokens, seed_of(reading.seed, name))
            for name, stream in zip(sources.names, _streams(sources, reading), strict=True)
        ]

    def row(self, lane: int, step: int) -> RowSpans:
        source, number = self._mixture.place(self._growth.rows_before(step) + lane)
        return RowSpans([(source, span) for span in self._windows[source].spans(number)], position=0)


class WalkingLanes:
    """Each lane walks one document after another. Under `join` all that it reads is one document."""

    def __init__(self, sources: Sources, reading: Reading) -> None:
        self._stride = reading.tokens_per_lane if reading.documents is Documents.join else None
        streams, shuffle = _streams(sources, reading), reading.shuffle_tokens
        self._lanes = Lanes(streams, sources.weights, reading.lanes, reading.tokens_per_lane, shuffle, reading.seed)

    def row(self, lane: int, step: int) -> RowSpans:
        spans = self._lanes.row(lane, step).spans
        return RowSpans(spans, spans[0][1].first if self._stride is None else step * self._stride)


def phase_seed(seed: int, phase_index: int) -> int:
    """64 bits from the run's seed and the phase, so that two phases on the same data read it in different orders."""
    return seed_of(seed, str(phase_index))
