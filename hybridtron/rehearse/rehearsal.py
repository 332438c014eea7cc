"""A rehearsal from start to end: this process gets a simulated GPU, runs training steps, and returns the results.

A rehearsal simulates two training steps on one rank without a GPU: first a step with few micro-batches, then a step
with more micro-batches. The difference between their costs is the cost of the additional micro-batches. Tensors have
shapes and no values. A process can rehearse any number of ranks for one kind of GPU. Afterwards the process cannot
compute on a real GPU."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import ParallelConfig
from hybridtron.planning.count import count
from hybridtron.planning.memory import plan
from hybridtron.planning.rates import GPU, GPUS
from hybridtron.rehearse import fake_cuda_shim
from hybridtron.rehearse.package_stubs import StubFinder

if TYPE_CHECKING:  # these modules import torch, which must be imported after the shim is loaded
    from hybridtron.ops.kernel_compiled import CompiledKernel
    from hybridtron.rehearse.capture import CaptureProof
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
    """Results for a distinct launch of our Triton kernels (see `KernelLaunch`)."""

    name: str
    grid: tuple[int, ...]
    launches: int  # number of such launches in the rehearsed step with more micro-batches
    compiled: CompiledKernel
    time: KernelTime  # modelled time of one launch


@dataclass(frozen=True)
class Rehearsed:
    """Result from rehearsing one rank.

    world: number of processes
    step: the two simulated steps
    time: modelled time for a full training step
    planned: bytes that the memory plan expects
    imbalance: rows that the rank's experts get, divided by the rows that they would get with even loads
    """

    gpu: GPU
    phase: ResolvedPhase
    world: int
    step: RankStep
    time: StepTime
    kernels: list[KernelReport]
    planned: int
    imbalance: float = 1.0

    @property
    def tokens(self) -> int:
        """Tokens in a step, over all ranks."""
        return self.phase.settings.global_batch * self.phase.settings.seq_len

    @property
    def tokens_of_micro_batch(self) -> int:
        """Tokens in one forward pass, over all context-parallel ranks that divide its sequences."""
        return self.phase.settings.micro_batch * self.phase.settings.seq_len * self.phase.chunks_together

    @property
    def tokens_per_second(self) -> float:
        """Modelled tokens per second and GPU, if all ranks take as long as this rank."""
        return self.tokens / self.time.seconds / self.world

    @property
    def mfu(self) -> float:
        """The model's FLOPs per second on a GPU (`planning/count`), divided by the GPU's dense bf16 peak."""
        flops = count(self.phase.arch, self.phase.settings.seq_len).flops_per_token
        return flops * self.tokens_per_second / self.gpu.peak


class RehearsalProcess:
    """This process's simulated GPU. Create the object before torch is imported."""

    def __init__(self, gpu: GPU, packages: Sequence[str] = INSTALLED) -> None:
        """Set up the simulated GPU. The `packages`, which are keys of `package_stubs.STUBS`, appear to be installed."""
        library = fake_cuda_shim.load()
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
        from hybridtron.rehearse.collectives import Collectives
        from hybridtron.rehearse.fake_cuda import pretend

        pretend(library, gpu)
        self.gpu = gpu
        self.collectives: Collectives = Collectives(gpu.node)
        self.collectives.install()
        # imports megatron-core, which must not find the stubs, so the stubs are added afterwards
        importlib.import_module("hybridtron.rehearse.step")
        sys.meta_path.append(StubFinder(packages))  # at the end, so that installed packages are found first

    def rehearse(
        self, phase: ResolvedPhase, world: int, rank: int, compiles: bool = True, imbalance: float = 1.0
    ) -> Rehearsed:
        """Rehearse one rank's steps in a layout with `world` processes, and return the results.

        With `compiles`, our Triton kernels are compiled, and their modelled times depend on their instructions. Without
        `compiles`, modelled times depend only on the bytes that the kernels read and write. With `parallel.expert`, the
        rank's experts get `imbalance` times as many rows as with even loads.
        """
        from hybridtron.rehearse.step import rehearse_rank
        from hybridtron.rehearse.step_time import step_time

        step = rehearse_rank(phase, world, rank, self.collectives, imbalance)
        operations = [*step.passes_of_many.operations, *step.update.operations]
        if compiles:
            kernels = list(self._kernels(operations, step.launches))
        else:
            kernels = []
        times = {number: kernel.time for number, kernel in enumerate(kernels)}
        time = step_time(step, times, self.gpu, phase.config.parallel.virtual_pipeline)
        planned = plan(phase, world, imbalance).ranks[step.place.pipeline.rank].memory.total
        return Rehearsed(self.gpu, phase, world, step, time, kernels, planned, imbalance)

    def capture(self, phase: ResolvedPhase) -> CaptureProof:
        """Rehearse the passes of two micro-batches, and return the reasons why a CUDA graph can't repeat them."""
        from hybridtron.rehearse.capture import prove_capture

        return prove_capture(phase, self.collectives)

    def calls(self, named: Callable[[], Iterable[tuple[Key, Callable[[], object]]]]) -> dict[Key, Work]:
        """Run functions on the simulated GPU, and return key -> work: launches, bytes, FLOPs and modelled seconds.

        `named` returns pairs (key, function). The functions have no parameters.
        """
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
        """Yield a report for each distinct kernel launch, in the order of the first occurrences."""
        from hybridtron.ops.kernel_compiled import instructions_of, read
        from hybridtron.rehearse.instructions import decoded
        from hybridtron.rehearse.kernel_time import CountedKernel, kernel_time, trips_of

        codes = [launch.compiled(self.gpu) for launch in launches.different]
        read_codes = zip(launches.different, codes, read(self.gpu.capability, codes), strict=True)
        for number, (launch, code, compiled) in enumerate(read_codes):
            runs = [operation for operation in operations if operation.kind == "kernel" and operation.variant == number]
            moved = runs[0].bytes if runs else 0
            instructions = decoded(instructions_of(code.cubin), compiled.instructions)
            counted = CountedKernel(compiled, instructions, trips_of(launch), prod(launch.grid), moved)
            yield KernelReport(launch.name, launch.grid, len(runs), compiled, kernel_time(counted, self.gpu))


def rehearse_calls(gpu: str, calls: str, *arguments: Any) -> dict[Any, Work]:
    """Rehearse the functions that a generator yields, and return key -> work, like `RehearsalProcess.calls`.

    `calls` names the generator as `module:name`, and `arguments` are the generator's arguments. This function sets up
    the simulated GPU, so run it in a new process.
    """
    process = RehearsalProcess(GPUS[gpu])
    module, _, name = calls.partition(":")
    return process.calls(lambda: getattr(importlib.import_module(module), name)(*arguments))


def different_ranks(parallel: ParallelConfig, world: int) -> Sequence[int]:
    """Return one global rank for each pipeline rank.

    Each returned rank is the last rank in its context-parallel group, since this rank needs the most memory. In
    Megatron's numbering, the tensor rank varies fastest, then the context rank, the data rank and the pipeline rank.
    """
    last = parallel.tensor * (parallel.context - 1)
    return range(last, world, world // parallel.pipeline)
