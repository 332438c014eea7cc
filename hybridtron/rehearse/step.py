"""One training step of one rank, by the code that trains, on a GPU that is not there.

The engine is built as for a run, with weights that have no values. Two steps are counted: one of as many micro-batches
as fill the pipeline, one of twice as many. What the second has more is what these micro-batches cost; the first
without them is what a step costs once. So the whole step is known, however many micro-batches it has. Where gradients
are reduced over ranks, a step is taken before these two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from hybridtron.architecture.table import parameter_table
from hybridtron.config.choices import Documents, StateMode
from hybridtron.config.layout import ProcessLaunch, data_parallel
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.data.batch import Batch, RowShare, SeqInfo
from hybridtron.engine.engine import Engine
from hybridtron.ops import flex_tiles
from hybridtron.ops.attention import flex
from hybridtron.ops.kernel_launch import recorded_launches
from hybridtron.ops.registry import choices
from hybridtron.parallel import groups
from hybridtron.rehearse import heard
from hybridtron.rehearse.absent_gpu import ValuesOfNobody, fake_tensors
from hybridtron.rehearse.attention_work import flex_kernel
from hybridtron.rehearse.census import Census, Operation, Sent, Wait
from hybridtron.rehearse.collectives import Collectives
from hybridtron.rehearse.launches import Launches
from hybridtron.rehearse.live import Course


@dataclass(frozen=True)
class CountedPart:
    """What a part of a step asked for, in order. Of all operations that were counted, `first` is the first one here."""

    first: int
    operations: list[Operation]
    waits: list[Wait]
    sent: list[Sent]
    copies: list[Sent]  # to the host and from it


@dataclass(frozen=True)
class RankStep:
    """A step of one rank: its passes with `few` micro-batches and with `many`, and its update."""

    rank: int
    place: groups.Groups
    implementations: list[tuple[str, str, str]]  # of every op: what runs, and why
    micro_batches: int  # that the step of a run has
    few: int
    many: int
    passes_of_few: CountedPart
    passes_of_many: CountedPart
    update: CountedPart
    course: Course  # of tensors, over the larger step
    launches: Launches
    other_lanes: int = 0  # bytes of carried states, old and new, of lanes that take part in a run's step alone

    @property
    def peak(self) -> int:
        """The most bytes that tensors have."""
        return max(self.course.total) + self.other_lanes


def rehearse_rank(phase: ResolvedPhase, world: int, rank: int, collectives: Collectives) -> RankStep:
    """Build the rank's engine and take its steps."""
    parallel = phase.config.parallel
    data = data_parallel(parallel, world)
    micro_batches = phase.settings.global_batch // (phase.settings.micro_batch * data * phase.chunks_together)
    unit = parallel.pipeline * (phase.states.chunks // phase.chunks_together)
    few = min(unit, micro_batches)
    many = min(2 * unit, micro_batches)
    census = Census()
    launches = Launches()
    sent = collectives.begin(census)
    with counting(census, launches):
        place = groups.start(parallel, launch=ProcessLaunch(rank, world), fake=True)
        try:
            engine = build_engine(phase, place)
            steps = _Steps(phase, engine, census, sent)
            if data * parallel.context > 1:
                steps.take(few)  # in a run's first step Megatron hides no gradient's reduction
            first, _ = steps.take(few)
            start = len(census.memory.changes)
            second, update = steps.take(many)
            course = census.memory.course(start)
            others = steps.other_lanes(phase.lanes // data)
        finally:
            groups.stop()
    return RankStep(
        rank, place, choices("cuda"), micro_batches, few, many, first, second, update, course, launches, others
    )


@contextmanager
def counting(census: Census, launches: Launches) -> Iterator[None]:
    """Nothing is computed inside, and all is counted. Groups over gloo, which checkpoints use, are not formed."""
    core: Any = parallel_state
    kernels: Any = flex_tiles
    kernels._kernel = flex_kernel  # torch.compile has nothing to compile for
    flex._mask_of_sizes.cache_clear()  # tensors of one rehearsal are not another's
    for name in ("get_data_parallel_group_gloo", "get_expert_data_parallel_group_gloo"):
        setattr(core, name, lambda *_, **__: parallel_state.get_data_parallel_group())

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        census.add_kernel(*launches.note(kernel, grid, arguments, options))

    with fake_tensors(), ValuesOfNobody(), census, recorded_launches(note), heard.listening(census):
        yield


def build_engine(phase: ResolvedPhase, place: groups.Groups) -> Engine:
    """As for a run; every weight comes from a checkpoint that has no values."""
    table = parameter_table(phase.config.model)
    return Engine(phase.config, place, lambda name: torch.empty(table[name].shape), phase=phase.index)


class _Steps:
    """Steps of the phase, each counted."""

    def __init__(self, phase: ResolvedPhase, engine: Engine, census: Census, sent: list[Sent]) -> None:
        self.phase = phase
        self.engine = engine
        self.census = census
        self.sent = sent

    def take(self, micro_batches: int) -> tuple[CountedPart, CountedPart]:
        """The passes and the update of a step; where states are carried, of one that starts from states."""
        rows = self.phase.settings.micro_batch * micro_batches * self.phase.chunks_together // self.phase.states.chunks
        self.engine.start_phase(self.phase.index, range(rows))
        batches = [self._batch() for _ in range(micro_batches)]
        if self.phase.states.mode is not StateMode.zero:
            self._counted("unseen", lambda: self.engine.forward_backward(batches, 0))
            self._counted("unseen", lambda: self.engine.step(1e-4))
        passes = self._counted("passes", lambda: self.engine.forward_backward(batches, 1))
        return passes, self._counted("update", lambda: self.engine.step(1e-4))

    def other_lanes(self, lanes: int) -> int:
        """Bytes of what is carried, old and new, of those of all lanes that the last step did not have."""
        carrier = self.engine.carrier
        if carrier is None or not carrier.held:
            return 0
        held = sum(tensor.nbytes for parts in carrier.held.values() for tensor in parts.values())
        return 2 * held * (lanes - len(carrier.lanes)) // len(carrier.lanes)

    def _counted(self, part: str, run: Callable[[], object]) -> CountedPart:
        census = self.census
        sent = self.sent
        first = len(census.operations)
        waits = len(census.waits)
        calls = len(sent)
        copies = len(census.copies)
        census.part = part
        run()
        return CountedPart(first, census.operations[first:], census.waits[waits:], sent[calls:], census.copies[copies:])

    def _batch(self) -> Batch:
        """As the loader makes it, of no values; where ranks share rows, of the rank's own tokens."""
        rows = self.phase.settings.micro_batch
        whole = self.phase.settings.seq_len * self.phase.chunks_together
        context = self.engine.groups.context
        length = whole // context.size
        zeros_BL = partial(torch.zeros, rows, length, device="cuda")
        isolated = self.phase.documents is Documents.isolate
        if isolated:
            documents_BL = zeros_BL(dtype=torch.int32)
        else:
            documents_BL = None
        continues_B = torch.ones(rows, dtype=torch.bool, device="cuda")
        if isolated:
            borders_E = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
        else:
            borders_E = None
        share = None
        if context.size > 1:
            behind_B = torch.zeros(rows, dtype=torch.int64, device="cuda")
            of_rows = [[(0, whole)] for _ in range(rows)]
            share = RowShare(context.size, context.rank, None, of_rows, length, behind_B, continues_B)
        seq = SeqInfo(
            zeros_BL(dtype=torch.int64),
            documents_BL,
            borders_E=borders_E,
            share=share,
            _spans=[[(0, length)] for _ in range(rows)],
        )
        carried = self.phase.states.mode is StateMode.tbtt
        tokens_BL = zeros_BL(dtype=torch.int64)
        labels_BL = zeros_BL(dtype=torch.int64)
        mask_BL = torch.ones(rows, length, dtype=torch.bool, device="cuda")
        return Batch(tokens_BL, labels_BL, mask_BL, seq, continues_B if carried else None)
