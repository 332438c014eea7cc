"""One rank's training step on a simulated GPU, taken by the code that trains.

The engine is built as for a run, with weights that have no values. Two steps are counted: one with as many
micro-batches as fill the pipeline, and one with twice as many. Their difference is these micro-batches' cost; the
remainder of the first is the cost that a step has once. Together they give the cost of a step with any number of
micro-batches. If gradients are reduced over ranks, another step is taken before these two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

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
    """Operations, waits and communication in a part of a step. `first` is the number of its first operation."""

    first: int
    operations: list[Operation]
    waits: list[Wait]
    sent: list[Sent]
    copies: list[Sent]  # between host and device


@dataclass(frozen=True)
class RankStep:
    """A step of one rank: its passes with `few` micro-batches and with `many`, and its update."""

    rank: int
    place: groups.Groups
    implementations: list[tuple[str, str, str]]  # of every op: its name, its implementation, and the reason
    micro_batches: int  # in a step of the run
    few: int
    many: int
    passes_of_few: CountedPart
    passes_of_many: CountedPart
    update: CountedPart
    course: Course  # memory timeline of the larger step
    launches: Launches
    other_lanes: int = 0  # bytes of carried states, old and new, of the lanes that only a run's step has

    @property
    def peak(self) -> int:
        """Largest number of bytes that tensors take at a time."""
        return max(self.course.total) + self.other_lanes


def rehearse_rank(phase: ResolvedPhase, world: int, rank: int, collectives: Collectives) -> RankStep:
    """Build the rank's engine, take its steps, and return the record."""
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
                steps.take(few)  # Megatron hides no gradient's reduction in the first step of a run
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
    """Count everything inside the context and compute nothing. Gloo groups, for checkpoints, are not formed."""
    kernels: Any = flex_tiles
    kernels._kernel = flex_kernel  # there is no device that torch.compile could compile for
    flex._mask_of_sizes.cache_clear()  # its tensors belong to one rehearsal

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        census.add_kernel(*launches.note(kernel, grid, arguments, options))

    with (
        groups.without_gloo_groups(),
        fake_tensors(),
        ValuesOfNobody(),
        census,
        recorded_launches(note),
        heard.listening(census),
    ):
        yield


def build_engine(phase: ResolvedPhase, place: groups.Groups) -> Engine:
    """Build the engine as for a run; every weight is loaded from a checkpoint without values."""
    table = parameter_table(phase.config.model)
    return Engine(phase.config, place, lambda name: torch.empty(table[name].shape), phase=phase.index)


class _Steps:
    """Runner for the phase's steps, which counts each."""

    def __init__(self, phase: ResolvedPhase, engine: Engine, census: Census, sent: list[Sent]) -> None:
        self.phase = phase
        self.engine = engine
        self.census = census
        self.sent = sent

    def take(self, micro_batches: int) -> tuple[CountedPart, CountedPart]:
        """Take a step with this number of micro-batches. Returns its passes and its update.

        If states are carried, another step is taken first, so that this one starts from states.
        """
        rows = self.phase.settings.micro_batch * micro_batches * self.phase.chunks_together // self.phase.states.chunks
        self.engine.start_phase(self.phase.index, range(rows))
        batches = [self._batch() for _ in range(micro_batches)]
        if self.phase.states.mode is not StateMode.zero:
            self._counted("unseen", lambda: self.engine.forward_backward(batches, 0))
            self._counted("unseen", lambda: self.engine.step(1e-4))
        passes = self._counted("passes", lambda: self.engine.forward_backward(batches, 1))
        return passes, self._counted("update", lambda: self.engine.step(1e-4))

    def other_lanes(self, lanes: int) -> int:
        """Return the bytes of carried states, old and new, for the lanes that the last step did not have."""
        carrier = self.engine.carrier
        if carrier is None or not carrier.held:
            return 0
        held = sum(tensor.nbytes for parts in carrier.held.values() for tensor in parts.values())
        return 2 * held * (lanes - len(carrier.lanes)) // len(carrier.lanes)

    def _counted(self, part: str, run: Callable[[], object]) -> CountedPart:
        """Run a part of the step, and return the records that it has added."""
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
        """Return a batch as the loader makes it, without values. Under context parallelism it has the rank's own
        tokens.
        """
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
            boundaries_E = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
        else:
            boundaries_E = None
        share = None
        if context.size > 1:
            behind_B = torch.zeros(rows, dtype=torch.int64, device="cuda")
            of_rows = [[(0, whole)] for _ in range(rows)]
            share = RowShare(context.size, context.rank, None, of_rows, length, behind_B, continues_B)
        seq = SeqInfo(
            zeros_BL(dtype=torch.int64),
            documents_BL,
            boundaries_E=boundaries_E,
            share=share,
            _spans=[[(0, length)] for _ in range(rows)],
        )
        carried = self.phase.states.mode is StateMode.tbtt
        tokens_BL = zeros_BL(dtype=torch.int64)
        labels_BL = zeros_BL(dtype=torch.int64)
        mask_BL = torch.ones(rows, length, dtype=torch.bool, device="cuda")
        return Batch(tokens_BL, labels_BL, mask_BL, seq, continues_B if carried else None)
