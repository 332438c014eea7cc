"""A rehearsal from start to end: this process gets a GPU that is not there, takes the steps, and returns the results.

A process can rehearse one kind of GPU, any number of times, and can compute on no real GPU afterwards.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hybridtron.config.layout import data_parallel
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.planning.count import count
from hybridtron.planning.memory import plan
from hybridtron.planning.rates import GPU, GPUS
from hybridtron.rehearse import guard
from hybridtron.rehearse.stand_ins import StandIns

if TYPE_CHECKING:  # they import torch, which must wait for the guard
    from hybridtron.ops.kernel_compiled import CompiledKernel
    from hybridtron.rehearse.census import Operation
    from hybridtron.rehearse.collectives import Collectives
    from hybridtron.rehearse.kernel_time import KernelTime
    from hybridtron.rehearse.launches import Launches
    from hybridtron.rehearse.step import RankStep
    from hybridtron.rehearse.step_time import StepTime, Work

INSTALLED = ("flash-attn",)  # packages that a GPU machine is taken to have
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class KernelReport:
    """One different launch of a kernel of ours: the kernel as compiled, its time, and how often it runs."""

    name: str
    grid: tuple[int, ...]
    launches: int  # of the larger step
    compiled: CompiledKernel
    time: KernelTime


@dataclass(frozen=True)
class Rehearsed:
    """What one rank was seen to do, what that takes, and what was planned for it."""

    gpu: GPU
    phase: ResolvedPhase
    world: int
    step: RankStep
    time: StepTime
    kernels: list[KernelReport]
    planned: int  # bytes

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.phase.settings.global_batch * self.phase.settings.seq_len

    @property
    def tokens_of_micro_batch(self) -> int:
        """Of one micro-batch of this rank."""
        return self.phase.settings.micro_batch * self.phase.settings.seq_len * self.phase.chunks_together

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU, if all ranks take as long as this one."""
        return self.tokens / self.time.seconds / self.world

    @property
    def expected_tokens_per_second(self) -> float:
        """The same with what each launch took beside the model where that was measured."""
        return self.tokens / self.time.expected_seconds / self.world

    @property
    def mfu(self) -> float:
        """Share of the GPU's dense bf16 peak that the model's FLOPs take, by the count of `planning/count`."""
        flops = count(self.phase.model, self.phase.settings.seq_len).flops_per_token
        return flops * self.tokens_per_second / self.gpu.peak


class RehearsalProcess:
    """This process, once it is one with a GPU that is not there."""

    def __init__(self, gpu: GPU, packages: Sequence[str] = INSTALLED) -> None:
        """These packages of `stand_ins.WORKS` count as installed where they are not here."""
        library = guard.load()
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
        from hybridtron.rehearse.absent_gpu import pretend
        from hybridtron.rehearse.collectives import Collectives

        pretend(library, gpu)
        self.gpu = gpu
        self.collectives: Collectives = Collectives(gpu.node)
        self.collectives.install()
        importlib.import_module("hybridtron.rehearse.step")  # megatron-core too, which is to find none of them
        sys.meta_path.append(StandIns(packages))  # at the end: what is installed is found first

    def rehearse(self, phase: ResolvedPhase, world: int, rank: int, compiles: bool = True) -> Rehearsed:
        """One rank's step. Kernels that are not compiled take as long as their bytes."""
        from hybridtron.rehearse.step import rehearse_rank
        from hybridtron.rehearse.step_time import step_time

        step = rehearse_rank(phase, world, rank, self.collectives)
        operations = [*step.passes_of_many.operations, *step.update.operations]
        if compiles:
            kernels = list(self._kernels(operations, step.launches))
        else:
            kernels = []
        times = {number: kernel.time for number, kernel in enumerate(kernels)}
        time = step_time(step, times, self.gpu, phase.config.parallel.virtual_pipeline)
        planned = plan(phase, world).ranks[step.place.pipeline_rank].memory.total
        return Rehearsed(self.gpu, phase, world, step, time, kernels, planned)

    def calls(self, named: Callable[[], Iterable[tuple[Key, Callable[[], object]]]]) -> dict[Key, Work]:
        """What each of these calls takes by itself. They are made on the GPU that is not there."""
        from hybridtron.rehearse.census import Census
        from hybridtron.rehearse.launches import Launches
        from hybridtron.rehearse.step import counting
        from hybridtron.rehearse.step_time import work

        census = Census()
        launches = Launches()
        ends = dict[Key, tuple[int, int]]()
        with counting(census, launches):
            for key, call in named():
                start = len(census.operations)
                call()
                ends[key] = start, len(census.operations)
        kernels = {number: kernel.time for number, kernel in enumerate(self._kernels(census.operations, launches))}
        return {key: work(census.operations[start:end], kernels, self.gpu) for key, (start, end) in ends.items()}

    def _kernels(self, operations: Sequence[Operation], launches: Launches) -> Iterator[KernelReport]:
        from hybridtron.ops.kernel_compiled import read
        from hybridtron.rehearse.kernel_time import kernel_time

        made = read(self.gpu.capability, [launch.compiled(self.gpu) for launch in launches.different])
        for number, (launch, compiled) in enumerate(zip(launches.different, made, strict=True)):
            own = [each for each in operations if each.kind == "kernel" and each.variant == number]
            moved = own[0].bytes if own else 0
            yield KernelReport(
                launch.name, launch.grid, len(own), compiled, kernel_time(launch, compiled, moved, self.gpu)
            )


def rehearse_calls(gpu: str, calls: str, *given: Any) -> dict[Any, Work]:
    """For a process of its own: the calls that the function `calls` (`module:name`) makes of what is given."""
    process = RehearsalProcess(GPUS[gpu])
    module, _, name = calls.partition(":")
    return process.calls(lambda: getattr(importlib.import_module(module), name)(*given))


def different_ranks(phase: ResolvedPhase, world: int) -> Sequence[int]:
    """One of each pipeline rank: Megatron counts tensor ranks first, then data ranks, then pipeline ranks."""
    parallel = phase.config.parallel
    data = data_parallel(parallel, world)
    return range(0, world, parallel.tensor * parallel.context * data)
