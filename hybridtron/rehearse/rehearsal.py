"""A rehearsal from start to end: this process gets a simulated GPU, takes the steps, and returns the results.

A process can rehearse one kind of GPU, any number of times. It cannot compute on a real GPU afterwards.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import ParallelConfig
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

INSTALLED = ("flash-attn",)  # packages that a GPU machine is assumed to have
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class KernelReport:
    """A distinct kernel launch: its compiled code, its time, and the number of its runs."""

    name: str
    grid: tuple[int, ...]
    launches: int  # runs in the larger step
    compiled: CompiledKernel
    time: KernelTime


@dataclass(frozen=True)
class Rehearsed:
    """Result of rehearsing one rank: the recorded step, its modelled time, and the planned memory."""

    gpu: GPU
    phase: ResolvedPhase
    world: int
    step: RankStep
    time: StepTime
    kernels: list[KernelReport]
    planned: int  # bytes

    @property
    def tokens(self) -> int:
        """Tokens in a step, over all ranks."""
        return self.phase.settings.global_batch * self.phase.settings.seq_len

    @property
    def tokens_of_micro_batch(self) -> int:
        """Tokens in one micro-batch, with rows at full length."""
        return self.phase.settings.micro_batch * self.phase.settings.seq_len * self.phase.chunks_together

    @property
    def tokens_per_second(self) -> float:
        """Modelled tokens per second and GPU, if all ranks take as long as this one."""
        return self.tokens / self.time.seconds / self.world

    @property
    def expected_tokens_per_second(self) -> float:
        """Tokens per second and GPU, with the measured launch overhead added to the model."""
        return self.tokens / self.time.expected_seconds / self.world

    @property
    def mfu(self) -> float:
        """Share of the GPU's dense bf16 peak that the model's FLOPs take, as `planning/count` counts them."""
        flops = count(self.phase.model, self.phase.settings.seq_len).flops_per_token
        return flops * self.tokens_per_second / self.gpu.peak


class RehearsalProcess:
    """This process, once it has a simulated GPU."""

    def __init__(self, gpu: GPU, packages: Sequence[str] = INSTALLED) -> None:
        """Set up the simulated GPU. The packages (of `stand_ins.WORKS`) count as installed."""
        library = guard.load()
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
        from hybridtron.rehearse.absent_gpu import pretend
        from hybridtron.rehearse.collectives import Collectives

        pretend(library, gpu)
        self.gpu = gpu
        self.collectives: Collectives = Collectives(gpu.node)
        self.collectives.install()
        importlib.import_module("hybridtron.rehearse.step")  # imports megatron-core, which must not find the stand-ins
        sys.meta_path.append(StandIns(packages))  # last, so that installed packages are found first

    def rehearse(self, phase: ResolvedPhase, world: int, rank: int, compiles: bool = True) -> Rehearsed:
        """Rehearse one rank's step. Kernels that are not compiled take as long as their bytes."""
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
        planned = plan(phase, world).ranks[step.place.pipeline.rank].memory.total
        return Rehearsed(self.gpu, phase, world, step, time, kernels, planned)

    def calls(self, named: Callable[[], Iterable[tuple[Key, Callable[[], object]]]]) -> dict[Key, Work]:
        """Return the launches, bytes, FLOPs and seconds of each call, made on the simulated GPU."""
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
        """Yield a report for each distinct launch, in order."""
        from hybridtron.ops.kernel_compiled import read
        from hybridtron.rehearse.kernel_time import kernel_time

        compiled_kernels = read(self.gpu.capability, [launch.compiled(self.gpu) for launch in launches.different])
        for number, (launch, compiled) in enumerate(zip(launches.different, compiled_kernels, strict=True)):
            runs = [operation for operation in operations if operation.kind == "kernel" and operation.variant == number]
            moved = runs[0].bytes if runs else 0
            yield KernelReport(
                launch.name, launch.grid, len(runs), compiled, kernel_time(launch, compiled, moved, self.gpu)
            )


def rehearse_calls(gpu: str, calls: str, *given: Any) -> dict[Any, Work]:
    """Rehearse the calls that the function `calls` (`module:name`) makes with these arguments.

    Run this in its own process, because it sets up the simulated GPU.
    """
    process = RehearsalProcess(GPUS[gpu])
    module, _, name = calls.partition(":")
    return process.calls(lambda: getattr(importlib.import_module(module), name)(*given))


def different_ranks(parallel: ParallelConfig, world: int) -> Sequence[int]:
    """Return one rank of each pipeline rank; among ranks that share rows the last, which holds the most.

    Megatron counts tensor ranks first, then context and data ranks, then pipeline ranks.
    """
    last = parallel.tensor * (parallel.context - 1)
    return range(last, world, world // parallel.pipeline)
