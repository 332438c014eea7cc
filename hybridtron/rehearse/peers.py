"""Rehearse other packages' kernels on our recipes' shapes, and write a page with their costs beside those of ours.

    python -m hybridtron.rehearse.peers benchmarks/peers.md --gpu h200

The calls and shapes are those of the GPU queue (`proving/gpu/queue/contests.py`). The packages are fla-core (the
kernels of flash-linear-attention) and mamba-ssm, whose kernels for SSD are Triton kernels. Two commands install them
without a CUDA compiler:

    pip install --no-deps fla-core einops
    MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm

A package that is missing has no rows, and the page names it. Kernels that are compiled CUDA code, such as mamba-ssm's
selective scan, can't be rehearsed.

Both sides' launches and bytes are counted in the same way: a Triton kernel reads or writes each of its tensors once.
Autotuned kernels run with the configuration in the middle of their list, since a choice among several would need a GPU.
No time on the page is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hybridtron.planning.rates import GPU, GPUS
from hybridtron.rehearse.rehearsal import RehearsalProcess
from hybridtron.train.jsonl import write_whole

MODULES = {"fla-core": "fla", "mamba-ssm": "mamba_ssm"}
CONTESTS = (
    "ssd, mamba-ssm",
    "ssd, fla-core",
    "gla, fla-core",
    "rwkv6, fla-core",
    "delta, fla-core",
    "conv, fla-core",
    "gated_rms_norm, fla-core",
)
"""Comparisons of the GPU queue whose other side consists of Triton kernels."""
COLUMNS = (
    "op",
    "sizes",
    "package",
    "launches: theirs",
    "ours",
    "GB: theirs",
    "ours",
    "ms by bytes: theirs",
    "ours",
    "ours by the model: ms",
)


@dataclass(frozen=True)
class PeerCost:
    """Forward and backward pass of an op at one size: launches and bytes of both sides.

    modelled   modelled seconds of our kernels
    bandwidth  bytes per second that the GPU's memory reaches
    """

    op: str
    size: str
    package: str
    theirs: tuple[float, float]
    ours: tuple[float, float]
    modelled: float
    bandwidth: float

    def cells(self) -> list[str]:
        """Return the row of the page's table, in the order of COLUMNS."""
        launches = [f"{launches:.0f}" for launches, _ in (self.theirs, self.ours)]
        gigabytes = [f"{moved / 1e9:.2f}" for _, moved in (self.theirs, self.ours)]
        milliseconds = [f"{1e3 * moved / self.bandwidth:.2f}" for _, moved in (self.theirs, self.ours)]
        numbers = [*launches, *gigabytes, *milliseconds, f"{1e3 * self.modelled:.2f}"]
        return [self.op, self.size, self.package, *numbers]


class PeerLaunches:
    """Notes launches of any package's Triton kernels: a kernel's name, and the bytes of all its tensors."""

    def note(self, kernel: Any, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, int, int]:
        """Return the kernel's name, the bytes in all its different tensors, and 0, since no kernel is compiled."""
        from torch import Tensor

        from hybridtron.rehearse.census import size_of

        tensors = {id(value): value for value in (*arguments, *options.values()) if isinstance(value, Tensor)}
        return kernel.__name__, sum(map(size_of, tensors.values())), 0


def main(arguments: list[str] | None = None) -> int:
    """Rehearse both sides of each comparison, and write the page. Return the exit code."""
    parser = argparse.ArgumentParser(description="Rehearse other packages' kernels beside ours.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", default="h200", choices=sorted(GPUS))
    parser.add_argument("--only", action="append", choices=CONTESTS, help="may be repeated")
    parser.add_argument("--tiny", action="store_true", help="use tiny sizes, to try this command")
    chosen = parser.parse_args(arguments)
    missing = [package for package, module in MODULES.items() if importlib.util.find_spec(module) is None]
    process = RehearsalProcess(GPUS[chosen.gpu], packages=())
    names = [name for name in chosen.only or CONTESTS if name.partition(", ")[2] not in missing]
    costs = rehearse_peers(process, names, chosen.tiny) if names else []
    write_whole(chosen.file, page(chosen.gpu, costs, missing))
    return 0


def rehearse_peers(process: RehearsalProcess, names: Sequence[str], tiny: bool = False) -> list[PeerCost]:
    """Return the costs of both sides, for each comparison and size. With `tiny`, sizes are tiny."""
    from hybridtron.proving.gpu.queue import contests  # imports torch, which must come after RehearsalProcess

    simulate_driver(process.gpu)
    if any(name.endswith("mamba-ssm") for name in names):
        skip_compiled_parts("mamba_ssm")
    sizes = {
        (name, size): numbers
        for name in names
        for size, numbers in ({"tiny": contests.CONTESTS[name].tiny} if tiny else contests.CONTESTS[name].sizes).items()
    }
    theirs = {key: counted(contests.CONTESTS[key[0]], numbers) for key, numbers in sizes.items()}

    def calls() -> Iterator[tuple[tuple[str, str], Callable[[], object]]]:
        for key, numbers in sizes.items():
            contest = contests.CONTESTS[key[0]]
            yield key, partial(contests.both, contest.ours, contest.inputs(*numbers))

    ours = process.calls(calls)
    return [
        PeerCost(
            *(name.partition(", ")[0], size, name.partition(", ")[2]),
            theirs=theirs[name, size],
            ours=(ours[name, size].launches, ours[name, size].bytes),
            modelled=ours[name, size].seconds,
            bandwidth=process.gpu.bandwidth,
        )
        for name, size in sizes
    ]


def counted(contest: Any, numbers: Sequence[int]) -> tuple[float, float]:
    """Return how many kernels the other package launches in both passes, and how many bytes they move."""
    from hybridtron.ops.kernel_launch import tuned_over
    from hybridtron.proving.gpu.queue.contests import both
    from hybridtron.rehearse.census import Census
    from hybridtron.rehearse.step import counting

    census = Census()
    launches: Any = PeerLaunches()
    with counting(census, launches), tuned_over(1):
        inputs = contest.inputs(*numbers)
        first = len(census.operations)
        both(contest.theirs, inputs)
        operations = census.operations[first:]
    return len(operations), sum(operation.bytes for operation in operations)


def simulate_driver(gpu: GPU) -> None:
    """Give other packages the properties of the simulated GPU that they ask Triton and torch for."""
    from hybridtron.ops.kernel_compiled import target_absent_gpu
    from hybridtron.rehearse.fake_cuda import pretend_properties
    from hybridtron.rehearse.kernel_time import REGISTERS, RESERVED, SHARED

    shared = SHARED - RESERVED
    properties = {
        "multiprocessor_count": gpu.processors,
        "max_shared_mem": shared,
        "max_num_regs": REGISTERS,
        "warpSize": 32,
    }
    target_absent_gpu(gpu.capability, properties)
    pretend_properties(gpu, shared)


def skip_compiled_parts(package: str) -> None:
    """Let the package's Triton files be imported without its `__init__` files, which import compiled CUDA code."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    for part in ("", "ops", "ops/triton"):
        name = ".".join([package, *filter(None, part.split("/"))])
        module = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))
        module.__path__ = [str(folder / part)]
        sys.modules[name] = module


def page(gpu: str, costs: Sequence[PeerCost], missing: Sequence[str]) -> str:
    """Return the page as Markdown."""
    versions = [f"{package} {version(package)}" for package in MODULES if package not in missing]
    lines = [
        "# Other packages' kernels beside ours, rehearsed",
        "",
        f"`python -m hybridtron.rehearse.peers benchmarks/peers.md --gpu {gpu}`",
        "",
        f"- packages: {', '.join(versions) or 'none'}",
        f"- simulated GPU: {gpu.upper()}. **Nothing on this page is measured.** The forward and backward pass in bf16",
        "- launches and bytes of both sides are counted alike: a kernel reads or writes each of its tensors once",
        "- autotuned kernels run with the configuration in the middle of their list",
        "- ms by bytes is the time that the bytes take, a lower bound for both sides",
        "- ours by the model is the modelled time of our kernels ([the model](step_model.md)); theirs are not modelled",
        "- a GPU measures the same calls with `make gpu-measure` ([gpu_queue.md](gpu_queue.md))",
    ]
    lines += [f"- {package} is not installed, so its rows are missing" for package in missing]
    lines += ["", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(cost.cells())} |" for cost in costs]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
