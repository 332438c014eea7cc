"""Layouts that fit a number of devices, fastest first by a model of their time. Only a run can say which is fastest.

Tried are tensor 1, 2, 4, 8, pipelines of up to 16 ranks that the world and the layers allow, 1, 2 or 4 virtual stages,
rows shared out over up to 64 ranks, 2,048 tokens or more to each, micro-batches of 1 to 16 rows, of short ones as many
as have 65,536 tokens, and the least recomputation that fits into the memory, less a tenth of it for the allocator, the
network's buffers and the kernels' workspaces.

The time is that of `step_seconds.py`, by the rates of `rates.py`, which nobody has measured. Layouts with the same
time, to three digits, are in order of the ranks that share a model, of recomputation, and of memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hybridtron.architecture.table import architecture
from hybridtron.config.checks.parallel import parallel_problems, uncuttable
from hybridtron.config.checks.precision import precision_problems
from hybridtron.config.resolve import ResolvedPhase, resolve
from hybridtron.config.schema import Config, ParallelConfig, Recompute
from hybridtron.planning.memory import Plan, largest_phase, plan
from hybridtron.planning.rates import GPU, GPUS, HEAD_ROOM
from hybridtron.planning.step_seconds import step_seconds

TENSOR_SIZES = (1, 2, 4, 8)
_CONTEXT_SIZES = (1, 2, 4, 8, 16, 32, 64)
_LEAST_SHARE = 2048  # tokens: with fewer a rank hands over much for little work
_MAX_PIPELINE = 16
_VIRTUAL = (1, 2, 4)
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_MORE_MICRO_BATCHES = (32, 64, 128, 256, 512, 1024)
_MOST_TOKENS = 65_536  # of these


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits, with its settings, its plan and its modelled time."""

    parallel: ParallelConfig
    micro_batch: int
    plan: Plan
    seconds: float  # of a step, as a model
    rehearsed: int | None = None  # bytes of the fullest pipeline rank's tensors, if the step was rehearsed

    @property
    def sent_bytes(self) -> int:
        """Bytes that the busiest device sends in a step."""
        return max(rank.traffic.total for rank in self.plan.ranks)

    @property
    def order(self) -> tuple[float, int, int, int]:
        """Sort key: time to three digits, ranks that share a model, recomputation, memory."""
        recompute = list(Recompute).index(self.parallel.recompute)
        return float(f"{self.seconds:.3g}"), self.parallel.model_ranks, recompute, self.plan.fullest.memory.total


def fit(config: Config, gpus: int, memory_bytes: float, gpu: GPU = GPUS["h100"]) -> list[FittingLayout]:
    """Return the layouts that keep every rule and fit into each device's memory, fastest first by the model."""
    fitting = [
        layout
        for parallel in _layouts(config, gpus)
        for layout in _fitting(config, parallel, gpus, (1 - HEAD_ROOM) * memory_bytes, gpu)
    ]
    return sorted(fitting, key=lambda layout: layout.order)


def settings_of(layout: FittingLayout, config: Config) -> list[str]:
    """Return the arguments that turn this configuration into the layout; keys at their defaults are left out."""
    defaults = ParallelConfig()
    chosen = [
        f"parallel.{field.name}={_text(value)}"
        for field in dataclasses.fields(ParallelConfig)
        if (value := getattr(layout.parallel, field.name)) != getattr(defaults, field.name)
        or value != getattr(config.parallel, field.name)
    ]
    return chosen + [f"phases.{index}.micro_batch={layout.micro_batch}" for index in range(len(config.phases))]


def _layouts(config: Config, gpus: int) -> Iterator[ParallelConfig]:
    """Yield the layouts into which these devices can be arranged."""
    layers = len(architecture(config.model).specs)
    shortest = min(phase.seq_len for phase in config.phases)
    contexts = [size for size in _CONTEXT_SIZES if size == 1 or shortest // size >= _LEAST_SHARE]
    for tensor in TENSOR_SIZES:
        if uncuttable(config.model, tensor):
            continue
        pipelines = range(1, min(layers, gpus // tensor, _MAX_PIPELINE) + 1)
        for pipeline, context in itertools.product(pipelines, contexts):
            if gpus % (tensor * pipeline * context):
                continue
            for virtual in _VIRTUAL if pipeline > 1 else (1,):
                yield dataclasses.replace(
                    config.parallel,
                    tensor=tensor,
                    sequence=tensor > 1,
                    pipeline=pipeline,
                    virtual_pipeline=virtual,
                    context=context,
                    distributed_optimizer=True,
                )


def _fitting(
    config: Config, parallel: ParallelConfig, gpus: int, memory_bytes: float, gpu: GPU
) -> Iterator[FittingLayout]:
    """Yield this layout with every micro-batch that fits, under the least recomputation."""
    longest = max(phase.seq_len for phase in config.phases)
    for micro_batch in (*_MICRO_BATCHES, *(rows for rows in _MORE_MICRO_BATCHES if rows * longest <= _MOST_TOKENS)):
        phases = [dataclasses.replace(phase, micro_batch=micro_batch) for phase in config.phases]
        tried = dataclasses.replace(config, parallel=parallel, phases=phases)
        if any(_is_refused(phase, gpus) for phase in resolve(tried)):
            continue
        fitting = next(
            (
                (phase, layout_plan)
                for phase, layout_plan in _recomputing(tried, gpus)
                if layout_plan.fullest.memory.total <= memory_bytes
            ),
            None,
        )
        if fitting is None:
            return  # larger ones need more
        phase, layout_plan = fitting
        seconds = step_seconds(layout_plan, phase, gpu)
        yield FittingLayout(phase.config.parallel, phase.settings.micro_batch, layout_plan, seconds)


def _is_refused(phase: ResolvedPhase, gpus: int) -> bool:
    if phase.lanes % phase.settings.micro_batch:
        return True
    return any(parallel_problems(phase, gpus)) or any(precision_problems(phase))


def _recomputing(config: Config, gpus: int) -> Iterator[tuple[ResolvedPhase, Plan]]:
    """Yield the layout with ever more recomputation, so ever less memory."""
    amounts = list(Recompute)
    if config.parallel.offload:
        amounts = [Recompute.none]
    for recompute in amounts:
        parallel = dataclasses.replace(config.parallel, recompute=recompute)
        phase = largest_phase(dataclasses.replace(config, parallel=parallel))
        yield phase, plan(phase, gpus)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
