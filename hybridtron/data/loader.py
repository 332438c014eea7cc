"""The data loader for a phase, which returns the micro-batches of any requested step.

A lane is one row index in the global batch. The tokens that a lane reads in a step depend only on the seed, the lane
and the step. Each data-parallel rank reads a fixed range of lanes, and divides this range into micro-batches. The
loader keeps no position, so steps may be requested in any order. A step's global batch is equal for every micro-batch
size and every number of data-parallel ranks. To resume, a checkpoint needs only the step, the data that the run has
skipped, and the loader's `fingerprint`.
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
from hybridtron.data.rows import RowArrays, batch_of, gather
from hybridtron.data.sequence_shard import (
    UNSHARDED,
    RowShard,
    ShardIndex,
    StepRows,
    gather_shards,
    shard_of_row,
    with_shard,
)
from hybridtron.data.sources import Sources
from hybridtron.data.workers import end_with_parent, prefetched, unheard
from hybridtron.device import copied_ahead

Fingerprint = dict[str, str]
STACKS = signal.SIGUSR2  # a worker process that receives this signal writes its threads' stacks to stderr


@dataclass(frozen=True)
class Ahead:
    """Read-ahead settings.

    workers: number of worker processes; 0 for one thread in this process
    steps: how many steps each worker, or the thread, reads in advance
    """

    workers: int = 0
    steps: int = 2


class Loader:
    """The data loader for one phase and one rank.

    rank, ranks: this rank's data-parallel index, and the number of data-parallel ranks
    shard_index: the sequence shard that this rank reads in every row (context parallelism)
    """

    def __init__(
        self,
        sources: Sources,
        order: PhaseOrder,
        ahead: Ahead = Ahead(),
        feed: Feed = Feed.torch,
        rank: int = 0,
        ranks: int = 1,
        shard_index: ShardIndex = UNSHARDED,
    ) -> None:
        if order.lanes % (order.micro_batch * ranks):
            layout = f"micro_batch={order.micro_batch} on {ranks} ranks"
            raise ValueError(f"{order.lanes} lanes can't be divided into micro-batches with {layout}")
        if shard_index.ranks > 1 and (order.seq_len % shard_index.ranks or order.together > 1):
            count = shard_index.ranks
            layout = f"{count} ranks of rows of {order.seq_len} tokens, in {order.together} chunks at a time"
            raise ValueError(f"sequence shards must be equal parts of one chunk, so they can't be made for {layout}")
        self.sources = sources
        self.order = order
        self.ahead = ahead
        self.feed = feed
        self.shard_index = shard_index
        self.lanes = lanes_of_rank(order.lanes, rank, ranks)
        self._rows = _Rows(sources, order, rank, ranks, shard_index)

    @property
    def fingerprint(self) -> Fingerprint:
        """All settings that determine a step's tokens, as text. A resumed run must have the same fingerprint."""
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
            **({} if order.batch_ramp is None else {"ramp": str(order.batch_ramp.stairs)}),
        }

    @property
    def mean_stretch(self) -> float:
        """Mean number of tokens that a recurrent state sees before it is reset.

        States are reset at document boundaries with `data.documents=isolate`, and at row boundaries with
        `data.order=windows`. If neither applies, the number is infinite.
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
        """Return this rank's micro-batches in a step, on the CPU. The phase's first step is step 0."""
        return self._make_batches(self._rows[step])

    def _make_batches(self, read: StepRows) -> list[Batch]:
        return self._cut(batch_of(read.rows, self.order.documents), read.shards)

    def _cut(self, batch: Batch, shards: list[RowShard] | None) -> list[Batch]:
        """Split a step's rows into micro-batches.

        In a step, a lane reads `order.chunks` chunks with `seq_len` tokens each. A row of a micro-batch has
        `order.together` chunks of one lane. The micro-batches with the first chunks of all lanes come first, then the
        micro-batches with the next chunks.

        shards: each row's place in its full row; None if rows are full
        """
        rows = self.order.micro_batch
        turns = self.order.chunks // self.order.together
        if shards is not None:  # `_Rows` returns each chunk as a row; the first chunks of all lanes come first
            firsts = range(0, len(shards), rows)
            return [
                with_shard(group, shards[first : first + rows], self.shard_index)
                for first, group in zip(firsts, batch.split(rows), strict=True)
            ]
        groups = [group.chunks(turns) for group in batch.split(rows)]
        return [group[turn].with_boundaries() for turn in range(turns) for group in groups]

    def iterate(self, first_step: int, end_step: int) -> Generator[list[Batch], None, None]:
        """Yield each step's micro-batches on the device, from `first_step` to the step before `end_step`.

        The rows for further steps are read in the background.
        """
        steps = range(first_step, end_step)
        if self.feed is Feed.dali:
            from hybridtron.data.dali import dali_batches  # slow to import, and needs an optional package

            shards = deque[list[RowShard] | None]()  # sequence shards of the steps in DALI's queue

            def arrays() -> Iterator[RowArrays]:
                for step_rows in self._read_ahead(steps):
                    shards.append(step_rows.shards)
                    yield step_rows.rows

            for batch in dali_batches(arrays(), self.order.documents):
                yield self._cut(batch, shards.popleft())
        else:
            yield from copied_ahead(map(self._make_batches, self._read_ahead(steps)))

    def _read_ahead(self, steps: range) -> Iterator[StepRows]:
        if self.ahead.workers:
            return self._by_workers(steps)
        return prefetched(map(self._rows.__getitem__, steps), self.ahead.steps)

    def _by_workers(self, steps: range) -> Iterator[StepRows]:
        """Yield each step's rows, which worker processes read.

        torch's DataLoader sends step numbers to the workers. Workers send rows as numpy arrays through a pipe. If they
        sent tensors, DataLoader would write each tensor to a file in shared memory.

        No `timeout` is set, because only without a timeout does DataLoader check every few seconds that its workers
        live. If a worker hangs, the run's watchdog ends the run.
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
            generator=torch.Generator(),  # the default is torch's global generator, from which training draws
        )
        other_processes = set(multiprocessing.active_children())
        # These signals stop a run. Workers must not receive them, because the run still reads rows until it stops.
        with unheard({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}):
            iterator = iter(loader)
        try:
            yield from iterator
        finally:
            for worker in set(multiprocessing.active_children()) - other_processes:
                worker.kill()  # workers have nothing to save, and a hanging worker ignores a request to end


def _worker_context() -> BaseContext:
    """Return a context in which workers are forked from a server process.

    The server has no threads, so forking is safe. It imports the workers' modules once for all workers.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _begin(_: int) -> None:
    faulthandler.register(STACKS)
    end_with_parent()  # torch ends a worker when the fork server ends, but not when the training process ends


def _as_it_is(rows: Any) -> Any:
    return rows


class _Rows(Dataset[StepRows]):
    """Dataset that maps a step to this rank's rows.

    Only the constructor's arguments are pickled. From these arguments, a worker process opens its own stores.
    """

    def __init__(self, sources: Sources, order: PhaseOrder, rank: int, ranks: int, shard_index: ShardIndex) -> None:
        self._arguments = sources, order, rank, ranks, shard_index
        self._stores = sources.stores("train")
        self._dtype = sources.dtype
        self._joined = order.documents is Documents.join
        self._in_order = rows_in_order(sources, order)
        self._order = order
        self._rank = rank
        self._ranks = ranks
        self._shard_index = shard_index

    def __reduce__(self) -> tuple[type[_Rows], tuple[Sources, PhaseOrder, int, int, ShardIndex]]:
        return _Rows, self._arguments

    def __getitem__(self, step: int) -> StepRows:
        lanes = lanes_of_rank(self._order.lanes_in(step), self._rank, self._ranks)
        rows = [self._in_order.row(lane, step) for lane in lanes]
        if self._shard_index.ranks == 1:
            self._fetch(rows)
            return StepRows(gather(self._stores, rows, self._dtype, self._joined))
        length = self._order.seq_len
        begins = range(0, self._order.chunks * length, length)
        shards = [shard_of_row(row, begin, length, self._shard_index, self._joined) for begin in begins for row in rows]
        self._fetch([shard.row for shard in shards])
        return gather_shards(self._stores, shards, self._dtype, self._joined)

    def _fetch(self, rows: Sequence[RowSpans]) -> None:
        """Fetch the data shards of these rows into the cache, several at once, for sources that use the cache."""
        for number, store in enumerate(self._stores):
            if store.fetches:
                spans = [span for row in rows for source, span in row.spans if source == number]
                store.prepare(store.shard_of(span.document) for span in spans)


def lanes_of_rank(lanes: int, rank: int, ranks: int) -> range:
    """Return the contiguous range of lanes that one of `ranks` data-parallel ranks reads."""
    return range(rank * lanes // ranks, (rank + 1) * lanes // ranks)


def build_loader(
    phase: ResolvedPhase,
    rank: int = 0,
    ranks: int = 1,
    shard_index: ShardIndex = UNSHARDED,
    checked: bool = False,
) -> Loader:
    """Build a phase's loader. With `data.source=embedded`, prepare the embedded corpus first if it does not exist.

    With `checked`, another process of this machine has just built a loader for the phase, and checks the data.
    """
    data = phase.data
    ahead = Ahead(data.workers, data.prefetch)
    return Loader(Sources.open(phase, checked), PhaseOrder.of(phase), ahead, data.feed, rank, ranks, shard_index)
