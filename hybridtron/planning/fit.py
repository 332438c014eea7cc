"""Layouts that fit a cluster, the fastest first: an estimate that ranks, not a promise of a speed.

Tried are tensor 1, 2, 4, 8, pipelines of up to 16 ranks that the world and the layers allow, 1, 2 or 4 virtual stages,
micro batches of 1 to 16 rows, and the least recomputation that fits into the memory, less a tenth of it for the
allocator, the network's buffers and the kernels' workspaces. The time of a step is

    (m + (p - 1) / v) * slowest stage + what of the data-parallel traffic is not hidden

A stage's time for one micro batch is its weighed FLOPs (`layout.py`), 3 times forward and once more where it is
recomputed, over `EFFICIENCY` of the peak, `PASS_SECONDS` for every pass of a sub-layer, and its tensor- and
pipeline-parallel traffic, of which nothing is hidden but the pipeline's between virtual stages. Gradients are scattered
during the last micro batch's backward pass, weights gathered during the first one's forward pass.

Anchors on H100, bf16: Megatron-LM reports 41 to 49% of the peak for dense models of 1.7B to 32B, most of it after
communication. Samba 1.3B ran at 39.4 thousand tokens/s a device on 64 (33%) in the paper's own code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from hybridtron.architecture.table import architecture
from hybridtron.config.checks.parallel import parallel_problems, uncuttable
from hybridtron.config.checks.precision import precision_problems
from hybridtron.config.layout import mixer_cost
from hybridtron.config.schema import Config, ParallelConfig, PhaseConfig, Recompute
from hybridtron.planning.count import BACKWARD_AND_FORWARD, count
from hybridtron.planning.layer_use import is_recomputed, runs_again
from hybridtron.planning.memory import Plan, RankPlan, largest_phase, plan

HEAD_ROOM = 0.1  # of the memory, left for what the plan does not count
EFFICIENCY = 0.45  # of the peak, that the projections of a whole model reach
PASS_SECONDS = 50e-6  # launches and tails of a sub-layer's kernels, forward or backward
NODE = 8  # devices that NVLink joins
NVLINK = 450e9  # bytes/s that a device sends within its node
NETWORK = 50e9  # bytes/s that a device sends to other nodes
DEFAULT_PEAK_TFLOPS = 989.0  # H100, where cluster.peak_tflops is null

TENSOR_SIZES = (1, 2, 4, 8)
_MAX_PIPELINE = 16
_VIRTUAL = (1, 2, 4)
_MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, by what the slowest rank spends them on."""

    compute: float
    recompute: float
    overhead: float
    tensor: float
    pipeline: float
    bubble: float
    data: float

    @property
    def total(self) -> float:
        """All of it together."""
        return sum(getattr(self, part.name) for part in dataclasses.fields(self))


@dataclass(frozen=True)
class Candidate:
    """A layout that fits: what to set, what it needs, how fast it may be, and where its time goes."""

    parallel: ParallelConfig
    micro_batch: int
    plan: Plan
    time: StepTime
    mfu: float  # estimated; FLOPs of the model, recomputation not counted
    tokens_per_second: float  # of one device
    reason: str


def fit(config: Config, gpus: int, memory_bytes: float) -> list[Candidate]:
    """The layouts that keep every rule and fit into the memory of each of so many devices, the fastest first."""
    found = [
        candidate
        for parallel in _layouts(config, gpus)
        for candidate in _fitting(config, parallel, gpus, (1 - HEAD_ROOM) * memory_bytes)
    ]
    return sorted(found, key=lambda candidate: (candidate.time.total, candidate.plan.fullest.memory.total))


def settings_of(candidate: Candidate, config: Config) -> list[str]:
    """The arguments that turn this configuration into the candidate; what stays at its default is left out."""
    defaults = ParallelConfig()
    chosen = [
        f"parallel.{field.name}={_text(value)}"
        for field in dataclasses.fields(ParallelConfig)
        if (value := getattr(candidate.parallel, field.name)) != getattr(defaults, field.name)
        or value != getattr(config.parallel, field.name)
    ]
    return chosen + [f"phases.{index}.micro_batch={candidate.micro_batch}" for index in range(len(config.phases))]


def step_time(config: Config, made: Plan, phase: PhaseConfig) -> StepTime:
    """Seconds of a step under this plan, as the slowest rank spends them."""
    parallel = config.parallel
    peak = (config.cluster.peak_tflops or DEFAULT_PEAK_TFLOPS) * 1e12 * EFFICIENCY
    within = NVLINK if made.world_size <= NODE else NETWORK
    tokens = phase.tokens_per_step // made.data
    runs = tokens // (phase.seq_len * phase.micro_batch)  # forward passes of a sub-layer
    again, whole = _again_costs(config, phase.seq_len), runs_again(config, phase)

    def spent(rank: RankPlan) -> tuple[float, float, float, float, float]:
        layers = [layer for chunk in rank.chunks for layer in chunk.layers]
        rate = peak * parallel.tensor / tokens
        once = sum(chunk.cost for chunk in rank.chunks)
        redone = sum(again[layer] for layer in layers) + whole * once
        passes = sum((3 if again[layer] else 2) + whole for layer in layers) * runs
        hidden = parallel.virtual_pipeline > 1
        return (
            BACKWARD_AND_FORWARD * once / rate,
            redone / rate,
            passes * PASS_SECONDS,
            rank.traffic.tensor / (NVLINK if parallel.tensor <= NODE else NETWORK),
            0.0 if hidden else rank.traffic.pipeline / within,
        )

    slowest = max((spent(rank) for rank in made.ranks), key=sum)
    busy = sum(slowest)
    waiting = (parallel.pipeline - 1) / (parallel.virtual_pipeline * made.micro_batches)
    hiding = busy / made.micro_batches / BACKWARD_AND_FORWARD  # one micro batch's forward pass
    traffic = [rank.traffic for rank in made.ranks]
    gradients = max(part.gradients for part in traffic) / within - parallel.overlap_grad_reduce * 2 * hiding
    parameters = max(part.parameters for part in traffic) / within - parallel.overlap_param_gather * hiding
    return StepTime(*slowest, bubble=busy * waiting, data=max(gradients, 0) + max(parameters, 0))


def _layouts(config: Config, gpus: int) -> Iterator[ParallelConfig]:
    """The layouts that these devices can be arranged into."""
    layers = len(architecture(config.model).specs)
    for tensor in TENSOR_SIZES:
        if uncuttable(config, tensor):
            continue
        for pipeline in range(1, min(layers, gpus // tensor, _MAX_PIPELINE) + 1):
            if gpus % (tensor * pipeline):
                continue
            for virtual in _VIRTUAL if pipeline > 1 else (1,):
                is_shared = gpus > tensor * pipeline
                yield dataclasses.replace(
                    config.parallel,
                    tensor=tensor,
                    sequence=tensor > 1,
                    pipeline=pipeline,
                    virtual_pipeline=virtual,
                    distributed_optimizer=True,
                    overlap_grad_reduce=is_shared,
                    overlap_param_gather=is_shared,
                )


def _fitting(config: Config, parallel: ParallelConfig, gpus: int, memory_bytes: float) -> Iterator[Candidate]:
    """This layout with every micro batch that fits, and the least recomputation that makes it fit."""
    for micro_batch in _MICRO_BATCHES:
        phases = [dataclasses.replace(phase, micro_batch=micro_batch) for phase in config.phases]
        tried = dataclasses.replace(config, parallel=parallel, phases=phases)
        if any(tried.lanes_of(phase) % micro_batch for phase in phases) or any(parallel_problems(tried, gpus)):
            continue
        if any(precision_problems(tried)):
            continue
        fitting = next((found for found in _recomputing(tried, gpus) if _needs(found) <= memory_bytes), None)
        if fitting is None:
            return  # larger ones need more
        yield fitting


def _recomputing(config: Config, gpus: int) -> Iterator[Candidate]:
    """The layout with ever more recomputation, so ever slower."""
    phase = largest_phase(config)
    flops = count(config.model, phase.seq_len).flops_per_token
    peak = (config.cluster.peak_tflops or DEFAULT_PEAK_TFLOPS) * 1e12
    for recompute in Recompute:
        parallel = dataclasses.replace(config.parallel, recompute=recompute)
        tried = dataclasses.replace(config, parallel=parallel)
        made = plan(tried, gpus, phase)
        time = step_time(tried, made, phase)
        tokens_per_second = phase.tokens_per_step / time.total / gpus
        yield Candidate(
            parallel=parallel,
            micro_batch=phase.micro_batch,
            plan=made,
            time=time,
            mfu=flops * tokens_per_second / peak,
            tokens_per_second=tokens_per_second,
            reason=_reason(time),
        )


def _again_costs(config: Config, seq_len: int) -> list[int]:
    """Weighed forward FLOPs per token of every sub-layer that is recomputed, 0 where it is not."""
    arch = architecture(config.model)
    specs = dict(zip(arch.letters, arch.specs, strict=True))
    again = {
        letter: mixer_cost(spec, arch.sizes, seq_len)
        if is_recomputed(spec, arch.sizes, config.parallel.recompute)
        else 0
        for letter, spec in specs.items()
    }
    return [again[letter] for letter in arch.letters]


def _needs(candidate: Candidate) -> int:
    return candidate.plan.fullest.memory.total


def _reason(time: StepTime) -> str:
    """Where the time goes besides the computation: `compute 88%, bubble 9%, tensor 3%`."""
    shares = {part.name: getattr(time, part.name) / time.total for part in dataclasses.fields(time)}
    told = sorted(((share, name) for name, share in shares.items() if share >= 0.005), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in told)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
