"""One rank's training step on a simulated GPU, executed by the code that trains.

The engine is built as for a run, but all tensors have shapes without values. Two steps are counted:

few    a step with just enough micro-batches to fill the pipeline
many   a step with twice this number of micro-batches

Neither step has more micro-batches than a step of the run. The difference between the two steps is the cost of the
additional micro-batches. The remaining cost arises once in a step. These two costs give the cost of a step with any
number of micro-batches.

If gradients are reduced over ranks, another step is taken first and not counted, because in a run's first step Megatron
overlaps no gradient reduction with computation.

Letters in tensor names: B sequences, L tokens, E document boundaries in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from hybridtron.config.choices import Documents, StateMode
from hybridtron.config.pipeline_layout import ProcessLaunch, data_parallel
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.data.batch import Batch, SeqInfo, SequenceShard
from hybridtron.engine.engine import Engine
from hybridtron.ops import flex_tiles
from hybridtron.ops.attention import flex, torch_kernels
from hybridtron.ops.kernel_launch import recorded_launches
from hybridtron.ops.registry import choices
from hybridtron.parallel import groups
from hybridtron.parallel.mesh import RankGroup
from hybridtron.rehearse import events
from hybridtron.rehearse.attention_cost import flex_kernel, varlen_kernel
from hybridtron.rehearse.census import Census, Operation, Sent, Wait
from hybridtron.rehearse.collectives import Collectives
from hybridtron.rehearse.expert_loads import chosen_loads
from hybridtron.rehearse.fake_cuda import PlaceholderValues, fake_tensors
from hybridtron.rehearse.launches import Launches
from hybridtron.rehearse.memory_timeline import MemoryTimeline


@dataclass(frozen=True)
class CountedPart:
    """Operations, waits, communication calls and host-device copies in one part of a step.

    `first` is the index of the part's first operation in the census, which records all steps.
    """

    first: int
    operations: list[Operation]
    waits: list[Wait]
    sent: list[Sent]
    copies: list[Sent]  # asynchronous copies between host and device


@dataclass(frozen=True)
class RankStep:
    """One rank's recorded steps: passes with `few` and with `many` micro-batches, and the optimizer's update.

    Passes are the forward and backward passes for all micro-batches.
    """

    rank: int
    place: groups.Groups  # process groups of the rank
    implementations: list[tuple[str, str, str]]  # for each op: its name, its implementation, and the reason
    micro_batches: int  # number of micro-batches in a step of the run
    few: int
    many: int
    passes_of_few: CountedPart
    passes_of_many: CountedPart
    update: CountedPart
    timeline: MemoryTimeline  # memory in the step with `many` micro-batches
    launches: Launches
    other_lanes: int = 0  # bytes of carried states that are missing in the counted step (`_Steps.other_lanes`)

    @property
    def peak(self) -> int:
        """Peak memory of tensors in a run's step, in bytes."""
        return max(self.timeline.total) + self.other_lanes


def rehearse_rank(
    phase: ResolvedPhase, world: int, rank: int, collectives: Collectives, imbalance: float = 1.0
) -> RankStep:
    """Build the rank's engine, take its steps, and return their records.

    The rank's experts get `imbalance` times as many rows as with even loads.
    """
    parallel = phase.config.parallel
    data = data_parallel(parallel, world)
    micro_batches = phase.settings.global_batch // (phase.settings.micro_batch * data * phase.chunks_together)
    unit = parallel.pipeline * (phase.states.chunks // phase.chunks_together)
    few = min(unit, micro_batches)
    many = min(2 * unit, micro_batches)
    census = Census()
    launches = Launches()
    sent = collectives.begin(census)
    with counting(census, launches, imbalance):
        place = groups.start(parallel, launch=ProcessLaunch(rank, world), fake=True)
        try:
            engine = build_engine(phase, place)
            steps = _Steps(phase, engine, census, sent)
            if data * parallel.context > 1:
                steps.take(few)  # Megatron overlaps no gradient reduction in a run's first step
            first, _ = steps.take(few)
            start = len(census.memory.changes)
            second, update = steps.take(many)
            timeline = census.memory.timeline(start)
            others = steps.other_lanes(phase.lanes // data)
        finally:
            groups.stop()
    return RankStep(
        rank, place, choices("cuda"), micro_batches, few, many, first, second, update, timeline, launches, others
    )


@contextmanager
def counting(census: Census, launches: Launches, imbalance: float = 1.0) -> Iterator[None]:
    """Count all operations and launches inside the context, without computing anything."""
    kernels: Any = flex_tiles
    kernels._kernel = flex_kernel  # a stub, because torch.compile needs a real device
    torch_attention: Any = torch_kernels
    torch_attention._varlen_attn = lambda: varlen_kernel
    flex._mask_of_sizes.cache_clear()  # cached masks are tensors of an earlier rehearsal

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        census.add_kernel(*launches.note(kernel, grid, arguments, options))

    with (
        chosen_loads(imbalance),
        fake_tensors(),
        PlaceholderValues(),
        census,
        recorded_launches(note),
        events.listen(census),
    ):
        yield


def build_engine(phase: ResolvedPhase, place: groups.Groups) -> Engine:
    """Build the engine as for a run. Each initial full weight is an uninitialized tensor."""
    return Engine(phase, place, lambda name: torch.empty(phase.table[name].shape))


class _Steps:
    """Takes steps in a phase with one engine, and returns their records.

    `sent` is the list to which communication calls are appended.
    """

    def __init__(self, phase: ResolvedPhase, engine: Engine, census: Census, sent: list[Sent]) -> None:
        self.phase = phase
        self.engine = engine
        self.census = census
        self.sent = sent

    def take(self, micro_batches: int) -> tuple[CountedPart, CountedPart]:
        """Take a step with this many micro-batches. Return the records from its passes and from its update.

        If sequences start from earlier sequences' final states (`states.mode`), two steps are taken. The second step
        starts from the states that the first step has left, and only the second step is recorded.
        """
        rows = self.phase.settings.micro_batch * micro_batches * self.phase.chunks_together // self.phase.states.chunks
        self.engine.start_phase(self.phase, range(rows))
        batches = [batch_of(self.phase, self.engine.groups.context) for _ in range(micro_batches)]
        if self.phase.states.mode is not StateMode.zero:
            self._count_part("unseen", lambda: self.engine.forward_backward(batches, 0))
            self._count_part("unseen", lambda: self.engine.step(1e-4))
        passes = self._count_part("passes", lambda: self.engine.forward_backward(batches, 1))
        return passes, self._count_part("update", lambda: self.engine.step(1e-4))

    def other_lanes(self, lanes: int) -> int:
        """Return by how many bytes the states in a run's step exceed the states in the last counted step.

        A lane is a sequence's index in the batch. A sequence starts from the final state of the previous step's
        sequence with the same index. For each lane, the old and the new state are in memory. In a run, the rank has
        `lanes` lanes. A counted step has fewer lanes, because it has fewer micro-batches.
        """
        carrier = self.engine.carrier
        if carrier is None or not carrier.lane_states:
            return 0
        state_bytes = sum(tensor.nbytes for parts in carrier.lane_states.values() for tensor in parts.values())
        return 2 * state_bytes * (lanes - len(carrier.lanes)) // len(carrier.lanes)

    def _count_part(self, part: str, run: Callable[[], object]) -> CountedPart:
        """Call `run`, record its operations as the step's part `part`, and return the new records."""
        census = self.census
        sent = self.sent
        first = len(census.operations)
        waits = len(census.waits)
        calls = len(sent)
        copies = len(census.copies)
        census.part = part
        run()
        return CountedPart(first, census.operations[first:], census.waits[waits:], sent[calls:], census.copies[copies:])


def batch_of(phase: ResolvedPhase, context: RankGroup, documents: int = 1) -> Batch:
    """Return a micro-batch with the same tensors as a loader's micro-batch, but without values.

    With context parallelism, it has only the tokens of the rank's sequence shard. `documents` is the number of
    documents in each row, if the phase isolates documents.
    """
    rows = phase.settings.micro_batch
    whole = phase.settings.seq_len * phase.chunks_together
    length = whole // context.size
    zeros_BL = partial(torch.zeros, rows, length, device="cuda")
    isolated = phase.documents is Documents.isolate
    if isolated:
        documents_BL = zeros_BL(dtype=torch.int32)
    else:
        documents_BL = None
    continues_B = torch.ones(rows, dtype=torch.bool, device="cuda")
    if isolated:
        boundaries_E = torch.zeros(rows * documents + 1, dtype=torch.int32, device="cuda")
    else:
        boundaries_E = None
    shard = None
    if context.size > 1:
        behind_B = torch.zeros(rows, dtype=torch.int64, device="cuda")
        of_rows = [[(0, whole)] for _ in range(rows)]
        shard = SequenceShard(context.size, context.rank, None, of_rows, length, behind_B, continues_B)
    starts = [*range(0, length, -(-length // documents)), length]
    seq = SeqInfo(
        zeros_BL(dtype=torch.int64),
        documents_BL,
        boundaries_E=boundaries_E,
        shard=shard,
        _spans=[list(pairwise(starts)) for _ in range(rows)],
    )
    carried = phase.states.mode is StateMode.tbtt
    tokens_BL = zeros_BL(dtype=torch.int64)
    labels_BL = zeros_BL(dtype=torch.int64)
    mask_BL = torch.ones(rows, length, dtype=torch.bool, device="cuda")
    return Batch(tokens_BL, labels_BL, mask_BL, seq, continues_B if carried else None)
