"""Steps -> batches. The loader has no position of its own: a caller asks for a step, and gets its batches.

A lane is one row position in the batch. Its tokens in a step are a pure function of the seed, and a micro-batch is a
fixed slice of the lanes. So neither the micro-batch size, nor the number of data-parallel ranks, nor the order in which
steps are requested changes the data. A checkpoint needs only the step, the data skipped before it, and `fingerprint`.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hybridtron.config.choices import Documents, Feed, Order
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.data.batch import Batch
from hybridtron.data.order.phase_order import PhaseOrder, rows_in_order
from hybridtron.data.order.stream import RowSpans
from hybridtron.data.row_parts import WHOLE, PartOfRow, PartsRead, RowPart, gather_parts, part_of_row, with_share
from hybridtron.data.rows import RowArrays, batch_of, gather
from hybridtron.data.sources import Sources
from hybridtron.data.workers import end_with_parent, prefetched, unheard
from hybridtron.device import copied_ahead

Fingerprint = dict[str, str]
STACKS = signal.SIGUSR2  # signal on which a worker process writes its threads' stacks to stderr


@dataclass(frozen=True)
class Ahead:
    """Read-ahead settings: the number of worker processes (0: one thread), and of steps that each reads in advance."""

    workers: int = 0
    steps: int = 2


class Loader:
    """The batches for one phase: step -> micro-batches, in which every row is full.

    Each of the data-parallel `ranks` reads a contiguous range of lanes and, in their rows, its sequence shard (`part`).
    """

    def __init__(
        self,
        sources: Sources,
        order: PhaseOrder,
        ahead: Ahead = Ahead(),
        feed: Feed = Feed.torch,
        rank: int = 0,
        ranks: int = 1,
        part: RowPart = WHOLE,
    ) -> None:
        if order.lanes % (order.micro_batch * ranks):
            layout = f"micro_batch={order.micro_batch} on {ranks} ranks"
            raise ValueError(f"{order.lanes} lanes are not a multiple of {layout}")
        if part.ranks > 1 and (order.seq_len % part.ranks or order.together > 1):
            layout = f"{part.ranks} ranks of rows of {order.seq_len} tokens, in {order.together} chunks at a time"
            raise ValueError(f"shares of rows are equal parts of one chunk, not {layout}")
        self.sources = sources
        self.order = order
        self.ahead = ahead
        self.feed = feed
        self.part = part
        self.lanes = share_of(order.lanes, rank, ranks)
        self._rows = _Rows(sources, order, rank, ranks, part)

    @property
    def fingerprint(self) -> Fingerprint:
        """Everything that determines a step's tokens, as text. A resumed run must have the same fingerprint."""
        order = self.order
        return {
            "tokens": self.sources.described(),
            "tokenizer": self.sources.tokenizer_digest[:12],
            "eos": str(self.sources.eos),
            **({} if (chat := self.sources.chat) is None else {"chat": chat}),
            "data.order": order.kind.value,
            "data.documents": order.documents.value,
            "data.shuffle": str(order.shuffle_tokens),
            "seq_len": str(order.seq_len),
            "global_batch": str(order.global_batch),
            "states.chunks": str(order.chunks),
            "seed": str(order.seed),
            **({} if order.growth is None else {"ramp": str(order.growth.stairs)}),
        }

    @property
    def mean_stretch(self) -> float:
        """Mean number of tokens without a boundary, which limits how long a state lives.

        Infinite without any boundary.
        """
        if self.order.documents is Documents.isolate:
            per_token = self.sources.documents_per_token
        else:
            per_token = 0.0
        per_token += 1 / self.order.seq_len if self.order.kind is Order.windows else 0.0
        if per_token:
            return 1 / per_token
        return math.inf

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches in a step, on the CPU. Steps count from 0 at the start of the phase."""
        return self._made(self._rows[step])

    def _made(self, read: PartsRead) -> list[Batch]:
        return self._cut(batch_of(read.rows, self.order.documents), read.parts)

    def _cut(self, batch: Batch, parts: list[PartOfRow] | None) -> list[Batch]:
        """Split a step's rows into micro-batches: chunk 0 of every group of lanes, then chunk 1, and so on."""
        rows = self.order.micro_batch
        turns = self.order.chunks // self.order.together
        if parts is not None:  # chunks are separate rows, already in this order
            firsts = range(0, len(parts), rows)
            return [
                with_share(group, parts[first : first + rows], self.part)
                for first, group in zip(firsts, batch.split(rows), strict=True)
            ]
        groups = [group.chunks(turns) for group in batch.split(rows)]
        return [group[turn].with_boundaries() for turn in range(turns) for group in groups]

    def iterate(self, first_step: int, end_step: int) -> Generator[list[Batch], None, None]:
        """Yield each step's micro-batches, from `first_step` to before `end_step`, on the device.

        Rows are read ahead.
        """
        steps = range(first_step, end_step)
        if self.feed is Feed.dali:
            from hybridtron.data.dali import dali_batches  # slow to import, and needs an optional package

            parts = deque[list[PartOfRow] | None]()  # of the steps in DALI's queue

            def arrays() -> Iterator[RowArrays]:
                for parts_read in self._read_ahead(steps):
                    parts.append(parts_read.parts)
                    yield parts_read.rows

            for batch in dali_batches(arrays(), self.order.documents):
                yield self._cut(batch, parts.popleft())
        else:
            yield from copied_ahead(map(self._made, self._read_ahead(steps)))

    def _read_ahead(self, steps: range) -> Iterator[PartsRead]:
        if self.ahead.workers:
            return self._by_workers(steps)
        return prefetched(map(self._rows.__getitem__, steps), self.ahead.steps)

    def _by_workers(self, steps: range) -> Iterator[PartsRead]:
        """Read steps in worker processes. They hold no position either: each step is handed to a worker.

        Workers send rows as numpy arrays through a pipe, because tensors would take a file in shared memory each.
        Nothing comes through a dead worker's pipe, so DataLoader must check that its workers live. It does so every few
        seconds, unless it has a timeout of its own. The watchdog ends a run whose worker hangs.
        """
        loader: DataLoader[Any] = DataLoader(
            self._rows,
            sampler=steps,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.ahead.workers,
            prefetch_factor=self.ahead.steps,
            multiprocessing_context=_worker_context(),
            worker_init_fn=_begin,
            generator=torch.Generator(),  # otherwise each start would draw from training's random numbers
        )
        others = set(multiprocessing.active_children())
        with unheard({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}):  # a run that is stopping needs rows
            iterator = iter(loader)
        try:
            yield from iterator
        finally:
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()  # they hold no state, and a hanging worker would not end otherwise


def _worker_context() -> BaseContext:
    """Return a context that forks workers from a server without threads.

    The server imports the workers' modules once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _begin(_: int) -> None:
    faulthandler.register(STACKS)
    end_with_parent()  # torch watches only a worker's parent, the fork server


def _as_it_is(rows: Any) -> Any:
    return rows


class _Rows(Dataset[PartsRead]):
    """Dataset of a rank's rows, by step. A worker process builds its own from the same arguments."""

    def __init__(self, sources: Sources, order: PhaseOrder, rank: int, ranks: int, part: RowPart) -> None:
        self._arguments = sources, order, rank, ranks, part
        self._stores = sources.stores("train")
        self._dtype = sources.dtype
        self._joined = order.documents is Documents.join
        self._in_order = rows_in_order(sources, order)
        self._order = order
        self._rank = rank
        self._ranks = ranks
        self._part = part

    def __reduce__(self) -> tuple[type[_Rows], tuple[Sources, PhaseOrder, int, int, RowPart]]:
        return _Rows, self._arguments

    def __getitem__(self, step: int) -> PartsRead:
        lanes = share_of(self._order.lanes_in(step), self._rank, self._ranks)
        rows = [self._in_order.row(lane, step) for lane in lanes]
        if self._part.ranks == 1:
            self._fetch(rows)
            return PartsRead(gather(self._stores, rows, self._dtype, self._joined))
        length = self._order.seq_len
        begins = range(0, self._order.chunks * length, length)
        parts = [part_of_row(row, begin, length, self._part, self._joined) for begin in begins for row in rows]
        self._fetch([part.row for part in parts])
        return gather_parts(self._stores, parts, self._dtype, self._joined)

    def _fetch(self, rows: Sequence[RowSpans]) -> None:
        """Fetch shards in parallel, for sources that are not read in place."""
        for number, store in enumerate(self._stores):
            if store.fetches:
                spans = [span for row in rows for source, span in row.spans if source == number]
                store.prepare(store.shard_of(span.document) for span in spans)


def share_of(lanes: int, rank: int, ranks: int) -> range:
    """Return the lanes for one of `ranks` data-parallel ranks."""
    return range(rank * lanes // ranks, (rank + 1) * lanes // ranks)


def build_loader(phase: ResolvedPhase, rank: int = 0, ranks: int = 1, part: RowPart = WHOLE) -> Loader:
    """Build a phase's loader. Prepares the embedded corpus first, if it does not exist yet."""
    data = phase.data
    ahead = Ahead(data.workers, data.prefetch)
    return Loader(Sources.open(phase), PhaseOrder.of(phase), ahead, data.feed, rank, ranks, part)
