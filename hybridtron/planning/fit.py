"""Finds parallel layouts that fit into the memory of the GPUs, and sorts them by their estimated step time.

All combinations of these sizes are tried, as far as the GPU count and the model allow them:

- 1, 2, 4 or 8 tensor-parallel ranks
- 1 to 16 pipeline ranks, with 1, 2 or 4 virtual stages each
- 1 to 64 context-parallel ranks, with at least 2,048 tokens of a row each
- 1 to 64 ranks that divide the experts, if the model has experts; tensor-parallel ranks divide each expert, or hold
  full experts
- micro-batches with 1 to 16 rows, and up to 1,024 rows if a micro-batch has at most 65,536 tokens

Each combination uses the least recomputation with which the estimated memory is at most 90% of a GPU's memory. The
remaining tenth is left for the allocator, network buffers and kernel workspaces.

The step time is an estimate by `step_time.py`, so only a measurement can show which layout is fastest. Layouts whose
times agree to three digits are sorted by how many ranks divide a model, then by the amount of recomputation, then by
memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hybridtron.config.checks.experts import expert_problems, moe_letters
from hybridtron.config.checks.parallel import parallel_problems, uncuttable
from hybridtron.config.checks.precision import precision_problems
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.schema import Config, ParallelConfig, Recompute
from hybridtron.planning.memory import Plan, fullest_phase
from hybridtron.planning.rates import GPU, GPUS, HEAD_ROOM
from hybridtron.planning.step_time import step_seconds

TENSOR_SIZES = (1, 2, 4, 8)
_CONTEXT_SIZES = (1, 2, 4, 8, 16, 32, 64)
_EXPERT_SIZES = (1, 2, 4, 8, 16, 32, 64)
_LEAST_SHARE = 2048  # minimum tokens per context-parallel rank; with fewer, communication would dominate
_MAX_PIPELINE = 16
_VIRTUAL = (1, 2, 4)
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_MORE_MICRO_BATCHES = (32, 64, 128, 256, 512, 1024)
_MOST_TOKENS = 65_536  # maximum tokens in a micro-batch whose size is in _MORE_MICRO_BATCHES


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits into memory.

    plan: estimated memory and traffic
    seconds: a step's estimated time
    rehearsed: peak memory in bytes that `hybridtron rehearse` counted on the pipeline rank with the most memory; None
        if the step was not rehearsed
    """

    parallel: ParallelConfig
    micro_batch: int
    plan: Plan
    seconds: float
    rehearsed: int | None = None

    @property
    def sent_bytes(self) -> int:
        """Most bytes that any device sends in a step."""
        return max(rank.traffic.total for rank in self.plan.ranks)

    @property
    def order(self) -> tuple[float, int, int, int]:
        """Sort key: time to three digits, ranks that divide a model, recomputation, memory."""
        recompute = list(Recompute).index(self.parallel.recompute)
        return float(f"{self.seconds:.3g}"), self.parallel.model_ranks, recompute, self.plan.fullest.memory.total


def fit(run_plan: RunPlan, gpus: int, memory_bytes: float, gpu: GPU = GPUS["h100"]) -> list[FittingLayout]:
    """Return the valid layouts that fit into memory, sorted by estimated step time.

    memory_bytes: one GPU's memory
    """
    fitting = [
        layout
        for parallel in _layouts(run_plan, gpus)
        for layout in _fitting(run_plan, parallel, gpus, (1 - HEAD_ROOM) * memory_bytes, gpu)
    ]
    return sorted(fitting, key=lambda layout: layout.order)


def settings_of(layout: FittingLayout, config: Config) -> list[str]:
    """Return the command-line arguments that set a layout and its micro-batch.

    A key is left out if its value in the layout is the default, and the configuration has the same value.
    """
    defaults = ParallelConfig()
    chosen = [
        f"parallel.{field.name}={_text(value)}"
        for field in dataclasses.fields(ParallelConfig)
        if (value := getattr(layout.parallel, field.name)) != getattr(defaults, field.name)
        or value != getattr(config.parallel, field.name)
    ]
    return chosen + [f"phases.{index}.micro_batch={layout.micro_batch}" for index in range(len(config.phases))]


def _layouts(run_plan: RunPlan, gpus: int) -> Iterator[ParallelConfig]:
    """Yield the layouts that are possible with this many GPUs and the model's sizes."""
    config = run_plan.config
    layers = len(run_plan.arch.specs)
    shortest = min(phase.seq_len for phase in config.phases)
    contexts = [size for size in _CONTEXT_SIZES if size == 1 or shortest // size >= _LEAST_SHARE]
    for tensor in TENSOR_SIZES:
        if uncuttable(run_plan.arch, tensor, full_experts=True):
            continue  # `_is_refused` skips layouts in which the ranks can't divide the experts' inner channels
        pipelines = range(1, min(layers, gpus // tensor, _MAX_PIPELINE) + 1)
        for pipeline, context in itertools.product(pipelines, contexts):
            if gpus % (tensor * pipeline * context):
                continue
            divided = _divided_experts(run_plan, tensor, gpus // pipeline)
            for virtual, (expert, within) in itertools.product(_VIRTUAL if pipeline > 1 else (1,), divided):
                yield dataclasses.replace(
                    config.parallel,
                    tensor=tensor,
                    sequence=tensor > 1,
                    pipeline=pipeline,
                    virtual_pipeline=virtual,
                    context=context,
                    expert=expert,
                    expert_tensor=within,
                    distributed_optimizer=True,
                )


def _divided_experts(run_plan: RunPlan, tensor: int, stage: int) -> list[tuple[int, int | None]]:
    """Return the possible values of `parallel.expert` and `parallel.expert_tensor`.

    stage: number of ranks in a pipeline stage
    """
    counts = [spec.experts for spec in moe_letters(run_plan.arch).values()]
    if not counts:
        return [(1, None)]
    within = [(None, tensor)] if tensor == 1 else [(None, tensor), (1, 1)]
    return [
        (expert, option)
        for expert in _EXPERT_SIZES
        for option, ranks in within
        if stage % (expert * ranks) == 0 and not any(count % expert for count in counts)
    ]


def _fitting(
    run_plan: RunPlan, parallel: ParallelConfig, gpus: int, memory_bytes: float, gpu: GPU
) -> Iterator[FittingLayout]:
    """Yield a layout for each micro-batch size that fits, with as little recomputation as necessary."""
    longest = max(phase.seq_len for phase in run_plan.config.phases)
    for micro_batch in (*_MICRO_BATCHES, *(rows for rows in _MORE_MICRO_BATCHES if rows * longest <= _MOST_TOKENS)):
        tried = run_plan.with_layout(parallel, micro_batch)
        if any(_is_refused(phase, gpus) for phase in tried.phases):
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
            return  # larger micro-batches need more memory
        phase, layout_plan = fitting
        seconds = step_seconds(layout_plan, phase, gpu)
        yield FittingLayout(phase.config.parallel, phase.settings.micro_batch, layout_plan, seconds)


def _is_refused(phase: ResolvedPhase, gpus: int) -> bool:
    if phase.lanes % phase.settings.micro_batch:
        return True
    refused = itertools.chain(parallel_problems(phase, gpus), precision_problems(phase), expert_problems(phase))
    return any(refused)


def _recomputing(run_plan: RunPlan, gpus: int) -> Iterator[tuple[ResolvedPhase, Plan]]:
    """Yield, for each amount of recomputation from least to most, (phase that needs the most memory, its plan)."""
    amounts = list(Recompute)
    parallel = run_plan.config.parallel
    if parallel.offload:
        amounts = [Recompute.none]
    for recompute in amounts:
        yield fullest_phase(run_plan.with_layout(dataclasses.replace(parallel, recompute=recompute)), gpus)


def _text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
