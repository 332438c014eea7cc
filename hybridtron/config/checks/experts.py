"""Rules for models with experts: settings that the routed experts do not support.

The weights of all routed experts are one three-dimensional parameter, which no linear layer reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Documents, ParallelConfig
from hybridtron.config.update_rule import update_rule
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.problems import Problem

GROUPED_MULTIPLE = 8  # grouped products take bf16 channels in multiples


def expert_problems(phase: ResolvedPhase) -> Iterator[Problem]:
    """List settings that can't be honoured in a model with experts."""
    if phase.parsed is None:
        return
    letters = moe_letters(phase.parsed)
    if not letters:
        yield from _without_experts(phase.config.parallel)
        return
    yield from _layout(phase.parsed, phase.config.parallel)
    yield from _latent(phase.parsed, phase)
    yield from _shared_capacity(phase.parsed, phase)
    has = f"but model.pattern has experts ({', '.join(letters)})"
    if phase.config.run.compile:
        message = f"is true, {has}, whose routing can't be compiled: use run.compile=false"
        yield Problem("run.compile", "unsupported", message)


def moe_letters(arch: Architecture) -> dict[str, MoESpec]:
    """Return letter -> spec, for the letters with experts."""
    return {letter: spec for letter, spec in arch.by_letter.items() if isinstance(spec, MoESpec)}


def divides_experts(parallel: ParallelConfig) -> bool:
    """Return True if ranks divide experts in another way than other weights."""
    return parallel.expert > 1 or parallel.expert_tensor_ranks != parallel.tensor


def indivisible(arch: Architecture, parallel: ParallelConfig) -> Iterator[Problem]:
    """Report experts that the ranks can't divide evenly; `MoESpec.layout_problems` reports their inner channels."""
    for letter, spec in moe_letters(arch).items():
        if spec.experts % parallel.expert:
            what = f"is {parallel.expert}, which does not divide the {spec.experts} experts of model.layers.{letter}"
            yield Problem("parallel.expert", "not-divisible", f"{what}: use a divisor of {spec.experts}")


def _without_experts(parallel: ParallelConfig) -> Iterator[Problem]:
    """Report expert parallelism in a model without experts."""
    if parallel.expert > 1:
        yield Problem("parallel.expert", "no-effect", f"is {parallel.expert}, but the model has no experts: use 1")
    if parallel.expert_tensor is not None:
        message = f"is {parallel.expert_tensor}, but the model has no experts: leave it out"
        yield Problem("parallel.expert_tensor", "no-effect", message)


def _layout(arch: Architecture, parallel: ParallelConfig) -> Iterator[Problem]:
    """Report layouts in which the ranks can't divide the experts."""
    tensor = parallel.tensor
    within = parallel.expert_tensor
    if min(parallel.expert, parallel.expert_tensor_ranks) < 1:
        return  # `limit_problems` reports values below 1
    if within is not None and within not in (1, tensor):
        message = f"is {within}, must be 1 or parallel.tensor, {tensor}: leave it out for {tensor}"
        yield Problem("parallel.expert_tensor", "out-of-range", message)
        return
    if parallel.expert_tensor_ranks < tensor and not parallel.sequence:
        message = f"is 1 below parallel.tensor={tensor}, but each rank then needs tokens of its own"
        yield Problem(
            "parallel.expert_tensor", "needs-other-key", f"{message}: set parallel.sequence=true, or leave it out"
        )
    yield from indivisible(arch, parallel)


def _latent(arch: Architecture, phase: ResolvedPhase) -> Iterator[Problem]:
    """Report a matrix optimizer in a model with latent experts: it has no rule for their projections."""
    latent = [f"model.layers.{letter}.latent" for letter, spec in moe_letters(arch).items() if spec.latent]
    if latent and phase.optim.name in OPTIMIZERS and update_rule(phase.optim).matrix_stage is not None:
        message = f"is {phase.optim.name}, which has no rule for the projections of {', '.join(latent)}"
        yield Problem("optim.name", "unsupported", f"{message}: use optim.name=adamw")


def _shared_capacity(arch: Architecture, phase: ResolvedPhase) -> Iterator[Problem]:
    """Report capacities that isolated documents would share: earlier documents would decide the later drops."""
    if phase.documents is not Documents.isolate:
        return
    for letter, spec in moe_letters(arch).items():
        if spec.capacity is not None:
            message = f"is {spec.capacity}, and all documents in a row share it, but data.documents=isolate"
            cure = "set data.documents=join, or leave it out"
            yield Problem(f"model.layers.{letter}.capacity", "needs-other-key", f"{message}: {cure}")


def expert_warnings(phases: Sequence[ResolvedPhase]) -> list[str]:
    """Return a sentence for each surprising effect of experts. The phases must have passed `check`."""
    return [*_ungrouped(phases), *_in_bf16(phases)]


def _in_bf16(phases: Sequence[ResolvedPhase]) -> list[str]:
    """Return a sentence for each FP8 precision, in which experts stay in bf16."""
    names = {
        phase.key("precision.name"): phase.precision.name
        for phase in phases
        if moe_letters(phase.arch) and phase.precision.name in FP8_MULTIPLES
    }
    return [f"{key} is {name}, but experts, routed and shared, are computed in bf16" for key, name in names.items()]


def _ungrouped(phases: Sequence[ResolvedPhase]) -> list[str]:
    """Return a sentence for each size with which a GPU computes the experts' products one after the other.

    The host then waits for the experts' loads in each layer.
    """
    sizes: dict[str, int] = {}
    for phase in phases:
        tensor = phase.config.parallel.expert_tensor_ranks
        if phase.precision.name == "fp32":
            continue
        for letter, spec in phase.arch.by_letter.items():
            if isinstance(spec, MoESpec):
                if spec.latent:
                    sizes[phase.key(f"model.layers.{letter}.latent")] = spec.latent
                else:
                    sizes["model.width"] = phase.model.width
                sizes[phase.key(f"model.layers.{letter}.hidden") + " / parallel.expert_tensor"] = spec.hidden // tensor
    return [
        f"{name} is {size}, not a multiple of {GROUPED_MULTIPLE}: on a GPU, experts run one after the other, "
        "and the host waits in each layer with experts"
        for name, size in sizes.items()
        if size % GROUPED_MULTIPLE
    ]
